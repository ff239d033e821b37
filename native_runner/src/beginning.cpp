// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "beginning.h"

#include "backend_options.h"
#include "clock.h"
#include "files.h"

namespace farm {

void look_ahead(const Flags& flags, SharedReport* report) {
  report->enter(Stage::kLoad);
  file_size(flags.model_path, Stage::kLoad);
  report->enter(Stage::kOutputs);
  require_writable_folder(flags.output_folder_path, Stage::kOutputs);
  report->enter(Stage::kEtdump);
  if (!flags.etdump_file().empty()) require_writable_file(flags.etdump_file(), Stage::kEtdump);
  if (flags.dump_intermediate_outputs) require_writable_file(flags.debug_output_path, Stage::kEtdump);
}

OpenedProgram open_program(const Flags& flags, SharedReport* report) {
  report->enter(Stage::kLoad);
  const Clock::time_point verification_start = Clock::now();
  verify_program(flags.model_path);
  const int64_t verification_ns = ns_since(verification_start);
  report->update([&](Report* now) { now->verification_ns = verification_ns; });
  const Clock::time_point start = Clock::now();
  OpenedProgram opened;
  opened.program = std::make_shared<Program>(flags.model_path, LoadOptions(flags.backend).map(), flags.trace());
  opened.load_ns = ns_since(start);
  return opened;
}

}  // namespace farm
