// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace farm {

// Writer of JSON, from the outside in, with all commas. Strings are ASCII, and bytes that are not valid UTF-8 become
// U+FFFD, because paths and messages may have any bytes and the JSON must stay readable.
class Json {
 public:
  Json& object();
  Json& array();
  Json& end();
  Json& key(std::string_view name);
  Json& string(std::string_view text);
  Json& integer(int64_t value);
  Json& boolean(bool value);
  Json& null();

  Json& integer_or_null(const std::optional<int64_t>& value) { return value ? integer(*value) : null(); }
  Json& integers(const std::vector<int64_t>& values);

  // Writes values of an array that are JSON already, with the commas between them.
  Json& values(std::string_view written);

  const std::string& text() const { return text_; }

 private:
  void separate();
  void quote(std::string_view text);

  std::string text_;
  std::string closers_;     // missing '}' and ']', innermost last
  bool need_comma_ = false;
};

}  // namespace farm
