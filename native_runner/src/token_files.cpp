// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "token_files.h"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>

#include "failure.h"
#include "files.h"
#include "text.h"

namespace farm {

namespace {

constexpr int32_t kEnd = -1;

std::vector<int32_t> read_ids(const std::string& path) {
  const std::string bytes = read_text(path, Stage::kInputs);
  if (bytes.size() % sizeof(int32_t) != 0) {
    throw Failure(Stage::kInputs, "'" + path + "' has " + std::to_string(bytes.size()) + " bytes, which are no int32");
  }
  std::vector<int32_t> ids(bytes.size() / sizeof(int32_t));
  if (!ids.empty()) std::memcpy(ids.data(), bytes.data(), bytes.size());
  return ids;
}

// Returns the checked token ids of a file, without the padding.
std::vector<int32_t> sequence(const std::string& path, const std::vector<int32_t>& ids, size_t vocabulary,
                              size_t context) {
  const auto end = std::find(ids.begin(), ids.end(), kEnd);
  const std::vector<int32_t> tokens(ids.begin(), end);
  const auto refuse = [&](const std::string& why) { throw Failure(Stage::kInputs, "'" + path + "' " + why); };
  if (std::any_of(end, ids.end(), [](int32_t id) { return id != kEnd; })) refuse("goes on behind its end, -1");
  if (tokens.empty()) refuse("has no token");
  if (tokens.size() > context) {
    refuse("has " + std::to_string(tokens.size()) + " tokens, the program takes " + std::to_string(context));
  }
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] >= 0 && static_cast<size_t>(tokens[i]) < vocabulary) continue;
    refuse("has the token " + std::to_string(tokens[i]) + " at position " + std::to_string(i) +
           ": the vocabulary is 0 to " + std::to_string(vocabulary - 1));
  }
  return tokens;
}

Prompt read_prompt(const InputLine& line, size_t vocabulary, size_t context) {
  if (line.files.size() > 2) {
    throw Failure(Stage::kInputs, std::to_string(line.files.size()) + " files: a program that generates takes a prompt "
                                  "and, where logits are wanted, a sequence to score");
  }
  Prompt prompt;
  prompt.line = line.number;
  for (const std::string& file : line.files) {
    const std::vector<int32_t> ids = read_ids(file);
    prompt.file_tokens.push_back(ids.size());
    prompt.has_scored = prompt.file_tokens.size() == 2;
    (prompt.has_scored ? prompt.scored : prompt.tokens) = sequence(file, ids, vocabulary, context);
    if (prompt.has_scored) prompt.rows = ids.size();
  }
  return prompt;
}

}  // namespace

std::vector<Prompt> read_prompts(const std::vector<InputLine>& lines, size_t vocabulary, size_t context) {
  std::vector<Prompt> prompts;
  for (const InputLine& line : lines) {
    try {
      prompts.push_back(read_prompt(line, vocabulary, context));
    } catch (const Failure& failure) {
      throw Failure(Stage::kInputs, "line " + std::to_string(line.line_in_file) + ": " + failure.what(), std::nullopt,
                    line.number);
    }
  }
  return prompts;
}

std::vector<int32_t> parse_token_ids(const std::string& flag, const std::string& text) {
  std::vector<int32_t> ids;
  for (const std::string& piece : split_any(text, ",")) {
    char* end = nullptr;
    errno = 0;
    const long id = std::strtol(piece.c_str(), &end, 10);
    if (*end != '\0' || errno != 0 || id < 0 || id > INT32_MAX) {
      throw Failure(Stage::kFlags, "--" + flag + ": '" + piece + "' is no token id");
    }
    ids.push_back(static_cast<int32_t>(id));
  }
  return ids;
}

}  // namespace farm
