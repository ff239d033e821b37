// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "outputs.h"

#include "failure.h"
#include "files.h"

namespace farm {

namespace {

template <typename T>
TensorSpec write_scalar(const std::string& path, T value, const char* dtype) {
  write_file(path, &value, sizeof(value), Stage::kOutputs);
  return {{}, dtype, sizeof(value)};
}

TensorSpec write_value(const std::string& path, const executorch::runtime::EValue& value) {
  if (value.isTensor()) {
    const auto& tensor = value.toTensor();
    const TensorSpec spec = spec_of(tensor);
    if (spec.nbytes > 0 && tensor.const_data_ptr() == nullptr) throw Failure(Stage::kOutputs, "it has no data");
    write_file(path, tensor.const_data_ptr(), spec.nbytes, Stage::kOutputs);
    return spec;
  }
  if (value.isInt()) return write_scalar(path, value.toInt(), "int64");
  if (value.isDouble()) return write_scalar(path, value.toDouble(), "float64");
  if (value.isBool()) return write_scalar(path, value.toBool(), "bool");
  throw Failure(Stage::kOutputs, "it is neither a tensor nor a number");
}

}  // namespace

std::vector<TensorSpec> write_outputs(const std::string& folder, int64_t line,
                                      const std::vector<executorch::runtime::EValue>& values) {
  std::vector<TensorSpec> specs;
  for (size_t i = 0; i < values.size(); ++i) {
    const std::string name = "output_" + std::to_string(line) + "_" + std::to_string(i) + ".raw";
    try {
      specs.push_back(write_value(folder + "/" + name, values[i]));
    } catch (const Failure& failure) {
      throw Failure(Stage::kOutputs, name + ": " + failure.what(), failure.code, line);
    }
  }
  return specs;
}

}  // namespace farm
