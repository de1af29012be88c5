// Errors of the native core; module.cpp turns each kind into the Python exception of the same name.
#pragma once
#include <stdexcept>
#include <string>

namespace kvp {

enum class ErrorKind { Region, FormatVersion, Superblock, Geometry, Busy, Fenced, Medium, BufferShape, Namespace };

class Error : public std::runtime_error {
 public:
  Error(ErrorKind which, const std::string& message) : std::runtime_error(message), kind(which) {}
  ErrorKind kind;
};

// Our own state is wrong: not a bad byte of a medium and not a bad argument. Always on; a wrong block would be worse than a stopped process.
[[noreturn]] void check_failed(const char* condition, const char* file, int line);
#define KVP_CHECK(condition) ((condition) ? void(0) : ::kvp::check_failed(#condition, __FILE__, __LINE__))

}   // namespace kvp
