#include "kernels.inl"

namespace paceline {
const Kernels* avx512_kernels() { return &kKernels; }
}  // namespace paceline
