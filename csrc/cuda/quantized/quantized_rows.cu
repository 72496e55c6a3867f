// Rows of bytes as rows of floats: some of a matrix, or those of ids, times a number, plus another row.
#include "cuda/quantized/quantized.h"

namespace quire::cuda {
namespace {

constexpr int kThreads = 128;

// A block makes one row: rows first .. of the matrix, or ids[block].
struct Lookup {
  EmbeddingArgs args;
  RowsLayout layout;
  RowKind kind;
  int64_t first;
};

template <class T>
__global__ void __launch_bounds__(kThreads, 4) rows_kernel(const Lookup lookup) {
  const EmbeddingArgs& args = lookup.args;
  const int64_t token = blockIdx.x, id = args.ids ? args.ids[token] : lookup.first + token;
  const int channels = static_cast<int>(args.channels);
  const bool known = id >= 0 && id < args.table_rows;
  const uint8_t* row = static_cast<const uint8_t*>(args.table) + (known ? id : 0) * lookup.layout.row_bytes;
  const T* added = args.added ? static_cast<const T*>(args.added) + token * channels : nullptr;
  T* y = static_cast<T*>(args.y) + token * channels;
  for (int share = threadIdx.x; share < 4 * units_of(channels); share += kThreads) {
    for_kind(lookup.kind, [&](auto kind) {
      using Kind = decltype(kind);
      typename Kind::Share bytes;
#pragma unroll
      for (int run = 0; run < 2; ++run) {
        const Columns at{share / 4, run, share % 4, channels};
        if (at.first() >= channels) continue;
        float values[8] = {};
        if (known) {
          Kind::fetch(bytes, lookup.layout, row, at);
          Kind::values(values, bytes, lookup.layout, row, at);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int c = at.first() + i;
          if (c >= channels) continue;
          float value = args.scale == 1 ? values[i] : values[i] * args.scale;
          if (added) value += to_float(added[c]);
          y[c] = from_float<T>(value);
        }
      }
    });
  }
}

}  // namespace

void quantized_embedding(const EmbeddingArgs& args, Stream stream) {
  const Lookup lookup{args, layout_of(*args.format, args.channels), args.format->kind, 0};
  for_dtype(args.dtype, [&](auto zero) {
    launch(rows_kernel<decltype(zero)>, dim3(static_cast<unsigned>(args.tokens)), dim3(kThreads), 0, stream, lookup);
  });
}

void unpack_rows(const void* data, const RowFormat& format, int64_t features, int64_t first, int64_t count, void* to,
                 DType dtype, Stream stream) {
  EmbeddingArgs args{nullptr, data, nullptr, to, count, features, first + count, dtype};
  const Lookup lookup{args, layout_of(format, features), format.kind, first};
  for_dtype(dtype, [&](auto zero) {
    launch(rows_kernel<decltype(zero)>, dim3(static_cast<unsigned>(count)), dim3(kThreads), 0, stream, lookup);
  });
}

}  // namespace quire::cuda
