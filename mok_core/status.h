// Errors as values: Status, StatusOr<T>, the macros that pass them on, and MOK_CHECK for
// conditions that only a bug in MoK can break.
#pragma once

#include <cstdint>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "mok_core/macros.h"

namespace mok {

// The values are part of the C API (a call returns the code as int32): append, never renumber.
enum class StatusCode : int32_t {
  kOk = 0,
  kInvalidArgument = 1,     // a value that is wrong whatever the state: shape, flag, size
  kTypeMismatch = 2,        // a dtype other than the expected one
  kOutOfRange = 3,          // an index outside its range
  kFailedPrecondition = 4,  // a call that the object's state does not allow
  kDeadlineExceeded = 5,    // a bounded wait that ran out
  kAborted = 6,             // stopped because another part failed first
  kResourceExhausted = 7,   // memory or address space
  kUnavailable = 8,         // a peer or a system facility is not there
  kUnimplemented = 9,       // valid, and not supported by this build or machine
  kInternal = 10,           // a bug in MoK or an unexpected answer of the system
};

// "InvalidArgument" for kInvalidArgument, and so on; "Unknown" for a value that is no code.
const char* StatusCodeName(StatusCode code);

// The arguments written one after the other, each as operator<< writes it.
template <class... Args>
std::string StrCat(const Args&... args) {
  std::ostringstream stream;
  static_cast<void>((stream << ... << args));
  return std::move(stream).str();
}

// Success, or a code with a text for the user. The text names what was expected and what was found.
class [[nodiscard]] Status {
 public:
  // Success.
  Status() = default;
  // An error; with kOk, success, and the message is dropped.
  Status(StatusCode code, std::string message);

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

  // "Ok", or "InvalidArgument: <message>".
  std::string ToString() const;

  friend bool operator==(const Status& a, const Status& b) = default;

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

std::ostream& operator<<(std::ostream& stream, const Status& status);

inline Status OkStatus() { return Status(); }

// Each takes the pieces of its message, as StrCat does.
#define MOK_DEFINE_ERROR_HELPER(name)                           \
  template <class... Args>                                      \
  Status name##Error(const Args&... args) {                     \
    return Status(StatusCode::k##name, ::mok::StrCat(args...)); \
  }
MOK_DEFINE_ERROR_HELPER(InvalidArgument)
MOK_DEFINE_ERROR_HELPER(TypeMismatch)
MOK_DEFINE_ERROR_HELPER(OutOfRange)
MOK_DEFINE_ERROR_HELPER(FailedPrecondition)
MOK_DEFINE_ERROR_HELPER(DeadlineExceeded)
MOK_DEFINE_ERROR_HELPER(Aborted)
MOK_DEFINE_ERROR_HELPER(ResourceExhausted)
MOK_DEFINE_ERROR_HELPER(Unavailable)
MOK_DEFINE_ERROR_HELPER(Unimplemented)
MOK_DEFINE_ERROR_HELPER(Internal)
#undef MOK_DEFINE_ERROR_HELPER

namespace status_internal {

// Collects a text, writes it with the place to stderr, and aborts the process.
class CheckFailure {
 public:
  CheckFailure(const char* file, int line, const char* condition);
  [[noreturn]] ~CheckFailure();
  std::ostream& stream() { return stream_; }

 private:
  std::ostringstream stream_;
};

// Lets MOK_CHECK be a void expression whose text may be extended with <<, which binds tighter.
struct Voidify {
  void operator&(std::ostream&) const {}
};

inline const Status& AsStatus(const Status& status) { return status; }

}  // namespace status_internal

// Aborts with file, line, the condition and the streamed text when the condition is false. For
// bugs only; what a user can cause is a Status.  MOK_CHECK(a == b) << "a " << a;
#define MOK_CHECK(condition)                        \
  (condition) ? static_cast<void>(0)                \
              : ::mok::status_internal::Voidify() & \
                    ::mok::status_internal::CheckFailure(__FILE__, __LINE__, #condition).stream()

// A T, or the Status that says why there is none (never OkStatus).
template <class T>
class [[nodiscard]] StatusOr {
 public:
  // From an error. An OK status here is a bug and aborts.
  StatusOr(Status status) : status_(std::move(status)) {  // NOLINT(runtime/explicit)
    MOK_CHECK(!status_.ok()) << "StatusOr needs a value or an error";
  }
  // From anything that converts to T.
  template <class U = T>
    requires(std::is_convertible_v<U&&, T> && !std::is_same_v<std::remove_cvref_t<U>, Status> &&
             !std::is_same_v<std::remove_cvref_t<U>, StatusOr>)
  StatusOr(U&& value) : value_(std::forward<U>(value)) {}  // NOLINT(runtime/explicit)

  bool ok() const { return status_.ok(); }
  const Status& status() const { return status_; }

  // The value; without one, aborts with the status.
  T& value() & {
    CheckValue();
    return *value_;
  }
  const T& value() const& {
    CheckValue();
    return *value_;
  }
  T&& value() && {
    CheckValue();
    return *std::move(value_);
  }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T&& operator*() && { return std::move(*this).value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

 private:
  void CheckValue() const { MOK_CHECK(status_.ok()) << status_; }

  Status status_;
  std::optional<T> value_;
};

namespace status_internal {
template <class T>
const Status& AsStatus(const StatusOr<T>& status_or) {
  return status_or.status();
}
}  // namespace status_internal

// Evaluates a Status (or StatusOr) and returns its error from the enclosing function, if any.
#define MOK_RETURN_IF_ERROR(expression)                            \
  do {                                                             \
    if (const auto& mok_status = (expression); !mok_status.ok()) { \
      return ::mok::status_internal::AsStatus(mok_status);         \
    }                                                              \
  } while (false)

// MOK_ASSIGN_OR_RETURN(auto heap, Create(...)): moves the value out, or returns the error.
#define MOK_ASSIGN_OR_RETURN(declaration, expression) \
  MOK_ASSIGN_OR_RETURN_IMPL(MOK_CONCATENATE(mok_status_or_, __LINE__), declaration, expression)
#define MOK_ASSIGN_OR_RETURN_IMPL(temporary, declaration, expression) \
  auto temporary = (expression);                                      \
  if (!temporary.ok()) return temporary.status();                     \
  declaration = std::move(temporary).value()

}  // namespace mok
