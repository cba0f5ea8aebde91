// The merged order of a pass as a list, written from its description (task_program.h) with loops
// and lists. It shares no code with the closed-form decoding that it is there to test.
#pragma once

#include <vector>

#include "mok_schedule/program_shape.h"
#include "mok_schedule/task.h"
#include "mok_schedule/testing/random_program.h"

namespace mok::testing {

std::vector<Task> NaiveMergedOrder(const ProgramCase& program_case);

}  // namespace mok::testing
