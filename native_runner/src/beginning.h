// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <cstdint>
#include <memory>

#include "flags.h"
#include "program.h"
#include "report.h"

namespace farm {

// First steps of every run. All functions throw Failure.

// Checks files and folders before the load, which may take a minute for a large model.
void look_ahead(const Flags& flags, SharedReport* report);

struct OpenedProgram {
  std::shared_ptr<Program> program;
  int64_t load_ns = 0;  // load of the program, without its methods
};

// Verifies the program and reads it.
OpenedProgram open_program(const Flags& flags, SharedReport* report);

}  // namespace farm
