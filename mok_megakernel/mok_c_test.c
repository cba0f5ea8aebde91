/* The header is C: this file is compiled as C, and runs one small layer. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mok_megakernel/mok.h"

enum { kTokens = 3, kHidden = 8, kIntermediate = 8 };

static void Check(int32_t code, const char* what) {
  if (code == MOK_OK) return;
  fprintf(stderr, "%s: %s\n", what, mok_last_error());
  exit(1);
}

static float Silu(float value) { return value / (1 + expf(-value)); }

/* One expert, one route a token, weights of the identity: out = weight * silu(x) * x. */
int main(void) {
  float x[kTokens * kHidden], out[kTokens * kHidden], identity[kHidden * kIntermediate];
  float topk_weight[kTokens] = {0.5f, 1.0f, 2.0f};
  const int64_t topk_idx[kTokens] = {0, 0, -1};
  memset(identity, 0, sizeof(identity));
  for (int i = 0; i < kHidden; ++i) identity[i * kIntermediate + i] = 1;
  for (int i = 0; i < kTokens * kHidden; ++i) x[i] = 0.25f * (float)(i % 7) - 0.5f;

  MokWorkspaceOptions options = {0};
  options.struct_size = sizeof(options);
  options.ep_size = 1;
  options.max_tokens = kTokens;
  options.hidden = kHidden;
  options.topk = 1;
  options.dtype = MOK_FP32;
  options.timeout_seconds = 60;
  MokWorkspace* workspace = NULL;
  Check(mok_workspace_create(&options, &workspace), "workspace");

  MokEngineConfig config = {0};
  config.struct_size = sizeof(config);
  config.isa = -1;
  MokScheduleArgs schedule_args = {0};
  schedule_args.struct_size = sizeof(schedule_args);
  schedule_args.topk_idx = topk_idx;
  schedule_args.num_tokens = kTokens;
  schedule_args.num_local_experts = 1;
  MokSchedule* schedule = NULL;
  Check(mok_schedule_build(workspace, &config, &schedule_args, &schedule), "schedule");
  MokScheduleInfo info = {0};
  info.struct_size = sizeof(info);
  Check(mok_schedule_info(schedule, &info), "schedule info");

  MokForwardArgs args = {0};
  args.struct_size = sizeof(args);
  args.layer.x = x;
  args.layer.topk_weight = topk_weight;
  args.layer.routed.gate = identity;
  args.layer.routed.up = identity;
  args.layer.routed.down = identity;
  args.layer.routed.intermediate = kIntermediate;
  args.context.ring_rows = info.ring_rows;
  args.context.ring_x = malloc((size_t)info.ring_rows * kHidden * sizeof(float));
  args.context.ring_gate = malloc((size_t)info.ring_rows * kIntermediate * sizeof(float));
  args.context.ring_up = malloc((size_t)info.ring_rows * kIntermediate * sizeof(float));
  args.out = out;
  Check(mok_forward(workspace, &config, schedule, &args), "forward");

  int failures = 0;
  for (int token = 0; token < kTokens; ++token) {
    for (int i = token * kHidden; i < (token + 1) * kHidden; ++i) {
      const float weight = topk_idx[token] < 0 ? 0 : topk_weight[token];
      const float expected = weight * Silu(x[i]) * x[i];
      if (fabsf(out[i] - expected) > 1e-5f) {
        fprintf(stderr, "out[%d]: expected %g, got %g\n", i, expected, out[i]);
        ++failures;
      }
    }
  }
  free(args.context.ring_x);
  free(args.context.ring_gate);
  free(args.context.ring_up);
  mok_schedule_destroy(schedule);
  mok_workspace_destroy(workspace);
  return failures == 0 ? 0 : 1;
}
