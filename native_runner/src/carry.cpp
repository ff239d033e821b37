// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "carry.h"

#include <cstdio>
#include <cstring>

#include "failure.h"
#include "text.h"

namespace farm {

Carry::Carry(const std::string& text) {
  for (const std::string& piece : split_any(text, ",")) {
    unsigned output = 0;
    unsigned input = 0;
    int length = 0;
    // At most four digits: no program has more inputs or outputs.
    if (std::sscanf(piece.c_str(), "%4u:%4u%n", &output, &input, &length) != 2 ||
        static_cast<size_t>(length) != piece.size()) {
      throw Failure(Stage::kFlags, "--carry: '" + piece + "' is not an output and an input, `1:2`");
    }
    pairs_.push_back({output, input, {}});
  }
}

void Carry::check(const std::vector<TensorSpec>& inputs, const std::vector<TensorSpec>& outputs) const {
  for (const Pair& pair : pairs_) {
    const std::string what = "--carry: output " + std::to_string(pair.output) + " to input " +
                             std::to_string(pair.input) + ": ";
    if (pair.output >= outputs.size() || pair.input >= inputs.size()) {
      throw Failure(Stage::kLoad, what + "the method has " + std::to_string(outputs.size()) + " outputs and " +
                                      std::to_string(inputs.size()) + " inputs, counted from 0");
    }
    const TensorSpec& output = outputs[pair.output];
    const TensorSpec& input = inputs[pair.input];
    if (output.nbytes != input.nbytes || output.dtype != input.dtype) {
      throw Failure(Stage::kLoad, what + "that is " + to_string(output) + ", and this " + to_string(input));
    }
  }
}

void Carry::take(const Model& model) {
  for (Pair& pair : pairs_) {
    const auto& value = model.results()[pair.output];
    if (!value.isTensor()) throw Failure(Stage::kOutputs, "--carry: an output that is a number is no state");
    const auto* bytes = static_cast<const uint8_t*>(value.toTensor().const_data_ptr());
    pair.kept.assign(bytes, bytes + value.toTensor().nbytes());
  }
}

void Carry::give(const std::vector<TensorSpec>& inputs, Model* model) const {
  for (const Pair& pair : pairs_) {
    if (pair.kept.empty()) continue;
    if (pair.kept.size() != inputs[pair.input].nbytes) {
      throw Failure(Stage::kInputs, "--carry: output " + std::to_string(pair.output) + " had " +
                                        std::to_string(pair.kept.size()) + " bytes, input " +
                                        std::to_string(pair.input) + " is " + to_string(inputs[pair.input]));
    }
    std::memcpy(model->input_data(pair.input), pair.kept.data(), pair.kept.size());
  }
}

}  // namespace farm
