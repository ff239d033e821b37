// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "inputs.h"

#include "failure.h"
#include "files.h"

namespace farm {

namespace {

std::vector<std::string> split(const std::string& line) {
  std::vector<std::string> words;
  size_t at = 0;
  while ((at = line.find_first_not_of(" \t\r", at)) != std::string::npos) {
    const size_t end = line.find_first_of(" \t\r", at);
    words.push_back(line.substr(at, end - at));
    at = end == std::string::npos ? line.size() : end;
  }
  return words;
}

}  // namespace

std::vector<InputLine> read_input_list(const std::string& path) {
  const std::vector<uint8_t> content = read_file(path, file_size(path, Stage::kInputs), Stage::kInputs);
  const std::string text(content.begin(), content.end());
  std::vector<InputLine> lines;
  size_t line_in_file = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t end = text.find('\n', at);
    ++line_in_file;
    std::vector<std::string> files = split(text.substr(at, end - at));
    if (!files.empty()) lines.push_back({static_cast<int64_t>(lines.size()), line_in_file, std::move(files)});
    at = end == std::string::npos ? text.size() : end + 1;
  }
  if (lines.empty()) {
    throw Failure(Stage::kInputs, "'" + path + "' has no inference: write one line of input files for each");
  }
  return lines;
}

void check_inputs(const std::string& list_path, const std::vector<InputLine>& lines,
                  const std::vector<TensorSpec>& specs) {
  for (const InputLine& line : lines) {
    const std::string where = list_path + ":" + std::to_string(line.line_in_file) + ": ";
    if (line.files.size() != specs.size()) {
      throw Failure(Stage::kInputs,
                    where + std::to_string(line.files.size()) + " files, the method has " +
                        std::to_string(specs.size()) + " inputs",
                    std::nullopt, line.number);
    }
    for (size_t i = 0; i < specs.size(); ++i) {
      uint64_t size = 0;
      try {
        size = file_size(line.files[i], Stage::kInputs);
      } catch (const Failure& failure) {
        throw Failure(Stage::kInputs, where + failure.what(), std::nullopt, line.number);
      }
      if (size != specs[i].nbytes) {
        throw Failure(Stage::kInputs,
                      where + "'" + line.files[i] + "' has " + std::to_string(size) + " bytes, input " +
                          std::to_string(i) + " is " + to_string(specs[i]) + " and needs " +
                          std::to_string(specs[i].nbytes),
                      std::nullopt, line.number);
      }
    }
  }
}

std::vector<std::vector<uint8_t>> read_inputs(const InputLine& line, const std::vector<TensorSpec>& specs) {
  std::vector<std::vector<uint8_t>> inputs;
  for (size_t i = 0; i < specs.size(); ++i) {
    try {
      inputs.push_back(read_file(line.files[i], specs[i].nbytes, Stage::kInputs));
    } catch (const Failure& failure) {
      throw Failure(Stage::kInputs, failure.what(), std::nullopt, line.number);
    }
  }
  return inputs;
}

}  // namespace farm
