// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "json.h"

#include <cstdio>

namespace farm {

namespace {

constexpr uint32_t kReplacement = 0xFFFD;

// Returns the code point at `*at` and moves `*at` behind it, or by one byte if the bytes are not UTF-8.
uint32_t next_code_point(std::string_view text, size_t* at) {
  const auto byte = [&](size_t i) { return static_cast<uint32_t>(static_cast<unsigned char>(text[i])); };
  const uint32_t first = byte(*at);
  const size_t start = (*at)++;
  if (first < 0x80) return first;
  const size_t length = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  if (first < 0xC2 || first > 0xF4 || start + length > text.size()) return kReplacement;
  uint32_t point = first & (0x7Fu >> length);
  for (size_t i = start + 1; i < start + length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return kReplacement;
    point = (point << 6) | (byte(i) & 0x3F);
  }
  constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = point >= 0xD800 && point <= 0xDFFF;
  if (point < kLeast[length] || point > 0x10FFFF || surrogate) return kReplacement;
  *at = start + length;
  return point;
}

void append_unit(std::string* out, uint32_t unit) {
  char escaped[8];
  std::snprintf(escaped, sizeof(escaped), "\\u%04x", static_cast<unsigned>(unit & 0xFFFF));
  *out += escaped;
}

}  // namespace

void Json::separate() {
  if (need_comma_) text_ += ',';
  need_comma_ = true;
}

void Json::quote(std::string_view text) {
  text_ += '"';
  for (size_t at = 0; at < text.size();) {
    const uint32_t point = next_code_point(text, &at);
    if (point == '"' || point == '\\') {
      text_ += '\\';
      text_ += static_cast<char>(point);
    } else if (point == '\n') {
      text_ += "\\n";
    } else if (point >= 0x20 && point < 0x7F) {
      text_ += static_cast<char>(point);
    } else if (point < 0x10000) {
      append_unit(&text_, point);
    } else {
      append_unit(&text_, 0xD800 + ((point - 0x10000) >> 10));
      append_unit(&text_, 0xDC00 + ((point - 0x10000) & 0x3FF));
    }
  }
  text_ += '"';
}

Json& Json::object() {
  separate();
  text_ += '{';
  closers_ += '}';
  need_comma_ = false;
  return *this;
}

Json& Json::array() {
  separate();
  text_ += '[';
  closers_ += ']';
  need_comma_ = false;
  return *this;
}

Json& Json::end() {
  text_ += closers_.back();
  closers_.pop_back();
  need_comma_ = true;
  return *this;
}

Json& Json::key(std::string_view name) {
  separate();
  quote(name);
  text_ += ':';
  need_comma_ = false;
  return *this;
}

Json& Json::string(std::string_view text) {
  separate();
  quote(text);
  return *this;
}

Json& Json::integer(int64_t value) {
  separate();
  text_ += std::to_string(value);
  return *this;
}

Json& Json::boolean(bool value) {
  separate();
  text_ += value ? "true" : "false";
  return *this;
}

Json& Json::null() {
  separate();
  text_ += "null";
  return *this;
}

Json& Json::integers(const std::vector<int64_t>& values) {
  array();
  for (const int64_t value : values) integer(value);
  return end();
}

Json& Json::values(std::string_view written) {
  if (written.empty()) return *this;
  separate();
  text_ += written;
  return *this;
}

}  // namespace farm
