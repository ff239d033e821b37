// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "peak_memory.h"

#include <cinttypes>
#include <cstdio>

namespace farm {

std::optional<int64_t> peak_memory_bytes() {
  // Not getrusage: its number is kept by exec, so that it may belong to the program that started this one.
  std::FILE* status = std::fopen("/proc/self/status", "re");
  if (status == nullptr) return std::nullopt;
  std::optional<int64_t> found;
  char line[256];
  while (!found && std::fgets(line, sizeof(line), status) != nullptr) {
    int64_t kilobytes = 0;
    if (std::sscanf(line, "VmHWM: %" SCNd64 " kB", &kilobytes) == 1 && kilobytes > 0) found = kilobytes * 1024;
  }
  std::fclose(status);
  return found;
}

}  // namespace farm
