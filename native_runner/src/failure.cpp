// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "failure.h"

namespace farm {

const char* stage_name(Stage stage) {
  switch (stage) {
    case Stage::kFlags: return "flags";
    case Stage::kOptions: return "options";
    case Stage::kLoad: return "load";
    case Stage::kInputs: return "inputs";
    case Stage::kExecute: return "execute";
    case Stage::kOutputs: return "outputs";
    case Stage::kEtdump: return "etdump";
  }
  return "unknown";
}

int exit_code(Stage stage) {
  switch (stage) {
    case Stage::kFlags: return 2;
    case Stage::kOptions: return 3;
    case Stage::kLoad: return 4;
    case Stage::kInputs: return 5;
    case Stage::kExecute: return 6;
    case Stage::kOutputs: return 7;
    case Stage::kEtdump: return 8;
  }
  return 1;
}

}  // namespace farm
