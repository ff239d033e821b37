// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "words.h"

#include "failure.h"

namespace farm {

namespace {

bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; }

class Splitter {
 public:
  explicit Splitter(std::string_view line) : line_(line) {}

  std::vector<std::string> words() {
    std::vector<std::string> list;
    for (;;) {
      while (at_ < line_.size() && is_blank(line_[at_])) ++at_;
      if (at_ == line_.size()) return list;
      list.push_back(word());
    }
  }

 private:
  std::string word() {
    std::string text;
    while (at_ < line_.size() && !is_blank(line_[at_])) {
      const char c = line_[at_++];
      if (c == '\'') {
        while (next("'") != '\'') text += line_[at_ - 1];
      } else if (c == '"') {
        double_quoted(&text);
      } else if (c == '\\') {
        text += next("what a backslash quotes");
      } else {
        text += c;
      }
    }
    return text;
  }

  void double_quoted(std::string* text) {
    for (char c = next("\""); c != '"'; c = next("\"")) {
      if (c == '\\') {
        c = next("\"");
        // Between double quotes a backslash quotes these characters only; otherwise it is a character of the word.
        if (c != '\\' && c != '"' && c != '$' && c != '`') *text += '\\';
      }
      *text += c;
    }
  }

  char next(const char* missing) {
    if (at_ == line_.size()) {
      throw Failure(Stage::kFlags, "the job's line ends before " + std::string(missing) + ": quote as POSIX sh does");
    }
    return line_[at_++];
  }

  std::string_view line_;
  size_t at_ = 0;
};

}  // namespace

std::vector<std::string> split_words(std::string_view line) {
  if (line.find('\0') != std::string_view::npos) throw Failure(Stage::kFlags, "the job's line has a zero byte");
  return Splitter(line).words();
}

}  // namespace farm
