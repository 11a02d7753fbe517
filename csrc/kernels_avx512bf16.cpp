#include "kernels.inl"

namespace paceline {
const Kernels* avx512bf16_kernels() { return &kKernels; }
}  // namespace paceline
