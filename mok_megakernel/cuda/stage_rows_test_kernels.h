// Test only: the kernel that stages rows with each of its planted mistakes.
#pragma once

namespace mok::testing {

// bug: StageRowsBug.
const void* StageRowsKernelWithBug(int bug);

}  // namespace mok::testing
