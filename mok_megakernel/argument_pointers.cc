#include "mok_megakernel/argument_pointers.h"

#include <gtest/gtest.h>

namespace mok::testing {

void ExpectRefused(const Call& call, const Pointer& pointer, void* address,
                   const std::string& text) {
  void* const good = *pointer.place;
  *pointer.place = address;
  EXPECT_EQ(call(), MOK_INVALID_ARGUMENT) << pointer.name << " at " << address;
  EXPECT_NE(std::string(mok_last_error()).find(text), std::string::npos)
      << "expected " << text << ", got " << mok_last_error();
  *pointer.place = good;
}

void ExpectApart(const Call& call, const std::vector<Pointer>& written,
                 const std::vector<Pointer>& read) {
  // The moved tensor may reach into a third one, which is named first.
  const std::string text = ": expected memory that does not overlap ";
  for (size_t i = 0; i < written.size(); ++i) {
    for (const Pointer& other : read) ExpectRefused(call, written[i], *other.place, text);
    for (size_t j = 0; j < i; ++j) {
      ExpectRefused(call, written[i], *written[j].place, text);
      ExpectRefused(call, written[j], *written[i].place, text);
    }
  }
}

}  // namespace mok::testing
