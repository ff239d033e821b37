// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

namespace farm {

// Stage in which a run ended, in the order of a run. Exit codes of stages: docs/reference/native_runner.md.
enum class Stage { kFlags, kOptions, kLoad, kInputs, kExecute, kOutputs, kEtdump };

const char* stage_name(Stage stage);
int exit_code(Stage stage);

// Exit codes of ends outside of a stage.
constexpr int kExitTimeout = 9;
constexpr int kExitNoReader = 10;
constexpr int kExitSignalled = 11;

// Reason of the end of a run. `code` is ExecuTorch's error code; `line` is the number of the inference, from 0.
class Failure : public std::runtime_error {
 public:
  Failure(Stage where, const std::string& message, std::optional<int64_t> error_code = std::nullopt,
          std::optional<int64_t> inference = std::nullopt)
      : std::runtime_error(message),
        stage(where),
        exit_code(farm::exit_code(where)),
        code(error_code),
        line(inference) {}

  Stage stage;
  int exit_code;
  std::optional<int64_t> code;
  std::optional<int64_t> line;
};

}  // namespace farm
