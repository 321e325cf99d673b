// Zeroed pages, straight from the operating system: it provides each one when it is first written.
// The only place that knows how each system does that.
#pragma once

#include <cstddef>

namespace sparsestep {

// At least `bytes` zeroed bytes, page-aligned, on huge pages where the system has them. Throws
// std::bad_alloc. Release them with free_pages() and the same size.
void* allocate_pages(size_t bytes);
void free_pages(void* pages, size_t bytes) noexcept;

}  // namespace sparsestep
