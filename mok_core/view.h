// Non-owning views of row-major matrices. A view is a pointer, a shape and a row stride; it never
// allocates and is passed by value, on the host and into kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "mok_core/dtype.h"
#include "mok_core/macros.h"

namespace mok {

// [rows, columns] elements of T; element (r, c) is data[r * row_stride + c]. row_stride >= columns.
// No access is checked: a view is as fast as the pointer it holds.
template <class T>
struct MatrixView {
  T* data = nullptr;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t row_stride = 0;  // elements

  MOK_HOST_DEVICE constexpr T& operator()(int64_t row, int64_t column) const {
    return data[row * row_stride + column];
  }
  MOK_HOST_DEVICE constexpr T* Row(int64_t row) const { return data + row * row_stride; }

  // The [num_rows, num_columns] part whose first element is (first_row, first_column).
  MOK_HOST_DEVICE constexpr MatrixView Block(int64_t first_row, int64_t num_rows,
                                             int64_t first_column, int64_t num_columns) const {
    return {data + first_row * row_stride + first_column, num_rows, num_columns, row_stride};
  }
  MOK_HOST_DEVICE constexpr bool IsContiguous() const { return row_stride == columns || rows <= 1; }
  // A writable view is usable where a read-only one is asked for. (A template, because a read-only
  // view would otherwise have a conversion to itself, which nvcc warns of.)
  template <class U>
    requires(std::is_same_v<U, const T> && !std::is_const_v<T>)
  MOK_HOST_DEVICE constexpr operator MatrixView<U>() const {
    return {data, rows, columns, row_stride};
  }
};

// A view of contiguous rows.
template <class T>
MOK_HOST_DEVICE constexpr MatrixView<T> ContiguousMatrix(T* data, int64_t rows, int64_t columns) {
  return {data, rows, columns, columns};
}

// [rows, columns] elements whose dtype is known at run time; row_stride in elements.
template <class Void>
struct BasicUntypedMatrix {
  using Byte = std::conditional_t<std::is_const_v<Void>, const std::byte, std::byte>;

  Void* data = nullptr;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t row_stride = 0;  // elements
  DType dtype = DType::kBf16;

  // Address of element (row, column).
  MOK_HOST_DEVICE constexpr Byte* At(int64_t row, int64_t column) const {
    return static_cast<Byte*>(data) + (row * row_stride + column) * ElementBytes(dtype);
  }
  MOK_HOST_DEVICE constexpr BasicUntypedMatrix Block(int64_t first_row, int64_t num_rows,
                                                     int64_t first_column,
                                                     int64_t num_columns) const {
    return {At(first_row, first_column), num_rows, num_columns, row_stride, dtype};
  }
  MOK_HOST_DEVICE constexpr int64_t row_bytes() const { return columns * ElementBytes(dtype); }
  // The typed view; the caller has compared dtype.
  template <class T>
  MOK_HOST_DEVICE constexpr auto As() const {
    using Element = std::conditional_t<std::is_const_v<Void>, const T, T>;
    return MatrixView<Element>{static_cast<Element*>(data), rows, columns, row_stride};
  }
  // A writable matrix is usable where a read-only one is asked for.
  template <class U>
    requires(std::is_same_v<U, const void> && !std::is_const_v<Void>)
  MOK_HOST_DEVICE constexpr operator BasicUntypedMatrix<U>() const {
    return {data, rows, columns, row_stride, dtype};
  }
};

using UntypedMatrix = BasicUntypedMatrix<void>;
using ConstUntypedMatrix = BasicUntypedMatrix<const void>;

}  // namespace mok
