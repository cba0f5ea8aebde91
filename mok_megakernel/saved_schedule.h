// A schedule as int32 words: mok_schedule_save and mok_schedule_load.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "mok_core/status.h"
#include "mok_megakernel/schedule.h"

namespace mok {

// kInvalidArgument, naming both sizes, when `words` is too small. Words behind are left alone.
Status SaveSchedule(const Schedule& schedule, std::span<int32_t> words);

// kInvalidArgument unless SaveSchedule wrote the words: sizes and a checksum are compared.
StatusOr<std::unique_ptr<Schedule>> LoadSchedule(std::span<const int32_t> words);

}  // namespace mok
