#include "mok_megakernel/saved_schedule.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "mok_megakernel/fingerprint.h"
#include "mok_megakernel/mok.h"

namespace mok {
namespace {

constexpr uint64_t kMagic = 0x6d6f6b5f73636864;  // "mok_schd"; changes with the layout

// The first words. The arrays follow in the order of VisitArrays.
struct SavedHeader {
  uint64_t magic;
  uint64_t checksum;  // of everything behind this field, arrays included
  uint64_t fingerprint;
  int64_t num_tokens;
  int64_t num_tokens_total;
  int64_t num_experts;
  int64_t first_expert;
  int64_t minibatch_rows;
  int64_t ring_rows;
  int64_t num_local_experts;
  int64_t topk;
  int64_t ep_size;
  int64_t rank;
  int64_t num_row_blocks;
};
constexpr int64_t kHeaderWords = sizeof(SavedHeader) / sizeof(int32_t);
static_assert(kHeaderWords < MOK_SCHEDULE_HEADER_WORDS && sizeof(SavedHeader) % 8 == 0);
static_assert(std::is_trivially_copyable_v<SavedHeader>);

// Calls visit(array) for every array that is saved, in order. Sizes of the arrays follow from the
// header; block_expert and row_of_route follow from the arrays.
template <class AnySchedule, class Visit>
void VisitArrays(AnySchedule& schedule, Visit visit) {
  visit(schedule.table.expert_block_begin);
  visit(schedule.table.expert_rows);
  visit(schedule.table.source_rank);
  visit(schedule.table.source_route);
  visit(schedule.expert_ids);
}

SavedHeader HeaderOf(const Schedule& schedule) {
  const RoutingTable& table = schedule.table;
  return {kMagic,
          0,
          schedule.fingerprint,
          schedule.num_tokens,
          schedule.num_tokens_total,
          schedule.num_experts,
          schedule.first_expert,
          schedule.minibatch_rows,
          schedule.ring_rows,
          table.num_local_experts,
          table.topk,
          table.ep_size,
          table.rank,
          table.num_row_blocks()};
}

int64_t WordsOf(const SavedHeader& header) {
  return kHeaderWords + 2 * header.num_local_experts + 1 + 2 * header.num_row_blocks * kRowBlock +
         header.num_tokens * header.topk;
}

uint64_t ChecksumOf(std::span<const int32_t> words, int64_t num_words) {
  constexpr int64_t kSkipped = offsetof(SavedHeader, fingerprint) / sizeof(int32_t);
  return Fingerprint(words.subspan(kSkipped, static_cast<size_t>(num_words - kSkipped)));
}

// Sizes that can be allocated and add up, whatever the words hold.
bool IsPlausible(const SavedHeader& header, int64_t num_words) {
  // Schedules number tokens, routes and rows in int32; of such sizes no product overflows.
  const auto within = [](int64_t value, int64_t lowest) {
    return value >= lowest && value <= std::numeric_limits<int32_t>::max();
  };
  return header.magic == kMagic && within(header.num_local_experts, 0) &&
         within(header.num_row_blocks, 0) && within(header.num_tokens, 0) &&
         within(header.topk, 1) && WordsOf(header) <= num_words;
}

Schedule EmptySchedule(const SavedHeader& header) {
  Schedule schedule;
  schedule.fingerprint = header.fingerprint;
  schedule.num_tokens = header.num_tokens;
  schedule.num_tokens_total = header.num_tokens_total;
  schedule.num_experts = static_cast<int>(header.num_experts);
  schedule.first_expert = static_cast<int>(header.first_expert);
  schedule.minibatch_rows = header.minibatch_rows;
  schedule.ring_rows = header.ring_rows;
  RoutingTable& table = schedule.table;
  table.num_local_experts = static_cast<int>(header.num_local_experts);
  table.topk = static_cast<int>(header.topk);
  table.ep_size = static_cast<int>(header.ep_size);
  table.rank = static_cast<int>(header.rank);
  table.expert_block_begin.resize(static_cast<size_t>(header.num_local_experts + 1));
  table.expert_rows.resize(static_cast<size_t>(header.num_local_experts));
  table.source_rank.resize(static_cast<size_t>(header.num_row_blocks * kRowBlock));
  table.source_route.resize(table.source_rank.size());
  table.block_expert.resize(static_cast<size_t>(header.num_row_blocks));
  schedule.expert_ids.resize(static_cast<size_t>(header.num_tokens * header.topk));
  return schedule;
}

void FillBlockExperts(RoutingTable* table) {
  for (int expert = 0; expert < table->num_local_experts; ++expert) {
    const auto begin = table->block_expert.begin();
    const int32_t* bounds = table->expert_block_begin.data() + expert;
    std::fill(begin + bounds[0], begin + bounds[1], expert);
  }
}

}  // namespace

Status SaveSchedule(const Schedule& schedule, std::span<int32_t> words) {
  SavedHeader header = HeaderOf(schedule);
  const int64_t num_words = WordsOf(header);
  if (static_cast<int64_t>(words.size()) < num_words) {
    return InvalidArgumentError("num_words: this schedule takes ", num_words,
                                " words, got room for ", words.size());
  }
  int32_t* next = words.data() + kHeaderWords;
  VisitArrays(schedule, [&](const std::vector<int32_t>& array) {
    next = std::copy(array.begin(), array.end(), next);
  });
  std::memcpy(words.data(), &header, sizeof(header));
  header.checksum = ChecksumOf(words, num_words);
  std::memcpy(words.data(), &header, sizeof(header));
  return OkStatus();
}

StatusOr<std::unique_ptr<Schedule>> LoadSchedule(std::span<const int32_t> words) {
  const auto num_words = static_cast<int64_t>(words.size());
  SavedHeader header{};
  if (num_words >= kHeaderWords) std::memcpy(&header, words.data(), sizeof(header));
  if (!IsPlausible(header, num_words) || ChecksumOf(words, WordsOf(header)) != header.checksum) {
    return InvalidArgumentError("words: these ", num_words,
                                " words were not written by mok_schedule_save");
  }
  auto schedule = std::make_unique<Schedule>(EmptySchedule(header));
  const int32_t* next = words.data() + kHeaderWords;
  VisitArrays(*schedule, [&](std::vector<int32_t>& array) {
    std::copy_n(next, array.size(), array.begin());
    next += array.size();
  });
  FillBlockExperts(&schedule->table);
  schedule->FillRowOfRoute();
  return schedule;
}

}  // namespace mok
