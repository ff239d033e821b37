// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include "backend_options.h"
#include "flags.h"
#include "report.h"

namespace farm {

// State that all runs of a process share.
struct Backend {
  ProcessOptions* options = nullptr;
  bool warm = false;  // an anchor keeps the QNN backend started
};

// Loads, executes and writes as in `flags`, and fills in `report` step by step. On return every file is written and the
// program is unloaded. Throws Failure.
void run(const Flags& flags, const Backend& backend, SharedReport* report);

}  // namespace farm
