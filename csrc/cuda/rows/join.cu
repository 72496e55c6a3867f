// Heads of one tensor, and behind each that of another: copies, from wherever tokens and heads lie.
#include "cuda/common/kernels.h"
#include "cuda/common/vectors.h"

namespace quire::cuda {
namespace {

constexpr int kThreads = 128;

// One block of threads a head of a token. Word: what is moved at a time; strides and sizes in words.
template <class Word>
__global__ void __launch_bounds__(kThreads) join_kernel(JoinHeadsArgs args) {
  const int64_t t = blockIdx.x / args.heads, h = blockIdx.x % args.heads;
  const Word* first = static_cast<const Word*>(args.first) + t * args.first_stride + h * args.first_step;
  const Word* second = static_cast<const Word*>(args.second) + t * args.second_stride + h * args.second_step;
  const int64_t size = args.first_size + args.second_size;
  Word* y = static_cast<Word*>(args.y) + blockIdx.x * size;
  for (int64_t i = threadIdx.x; i < size; i += kThreads)
    y[i] = i < args.first_size ? first[i] : second[i - args.first_size];
}

}  // namespace

void join_heads(const JoinHeadsArgs& args, Stream stream) {
  const int64_t bytes = args.dtype == DType::float32 ? 4 : 2;
  JoinHeadsArgs words = args;
  int64_t* const numbers[] = {&words.first_stride,  &words.first_step,  &words.first_size,
                              &words.second_stride, &words.second_step, &words.second_size};
  bool wide = are_aligned(args.first, args.second, args.y);
  for (const int64_t* number : numbers) wide = wide && *number * bytes % 16 == 0;
  for (int64_t* number : numbers) *number = wide ? *number * bytes / 16 : *number;
  launch(wide         ? join_kernel<uint4>
         : bytes == 4 ? join_kernel<uint32_t>
                      : join_kernel<uint16_t>,
         dim3(static_cast<unsigned>(args.tokens * args.heads)), dim3(kThreads), 0, stream, words);
}

}  // namespace quire::cuda
