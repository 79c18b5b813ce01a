#include "bindings/tables.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "core/check.hpp"

namespace kvxfer::bindings {

namespace {

// Leaves room for rounding up and for sums without a wrap of 64 bits.
constexpr std::uint64_t kLimit = 1ull << 62;
constexpr std::uint64_t kMaxCount = 0xffffffff;
constexpr py::ssize_t kMaxTableLength = 1 << 30;
// The kernels count the words of a page in 32 bits.
constexpr std::uint64_t kMaxPageWords = kMaxCount;

using Wide = unsigned __int128;

std::string name_of(std::uint64_t value) { return std::to_string(value); }

template <class T>
std::uint32_t length(const Table<T>& table, const char* what) {
  KVXFER_REQUIRE(table.ndim() == 1, std::string("the table of ") + what + " has " +
                                        std::to_string(table.ndim()) + " axes; give one row");
  KVXFER_REQUIRE(table.size() <= kMaxTableLength, std::string("too many ") + what);
  return static_cast<std::uint32_t>(table.size());
}

template <class First, class Second>
std::uint32_t common_length(const Table<First>& first, const Table<Second>& second,
                            const char* what) {
  KVXFER_REQUIRE(first.ndim() == 1 && second.ndim() == 1 && first.size() == second.size(),
                 std::string("the two tables of ") + what + " have " +
                     std::to_string(first.size()) + " and " + std::to_string(second.size()) +
                     " entries; give two rows of one length");
  return length(first, what);
}

template <class T>
std::uint32_t num_rows(const Table<T>& table, py::ssize_t num_columns, const char* what) {
  KVXFER_REQUIRE(
      table.ndim() == 2 && table.shape(1) == num_columns,
      std::string("the table of ") + what + " is not [n, " + std::to_string(num_columns) + "]");
  KVXFER_REQUIRE(table.shape(0) <= kMaxTableLength, std::string("too many ") + what);
  return static_cast<std::uint32_t>(table.shape(0));
}

Conversion parse_conversion(const std::string& name) {
  if (name == "none") return Conversion::kNone;
  if (name == "bfloat16") return Conversion::kBf16ToE4m3;
  if (name == "float16") return Conversion::kF16ToE4m3;
  throw Error(ErrorKind::kInvalidUsage, "conversion '" + name + "'; use none, bfloat16 or float16");
}

enum BoxColumn {
  kFirstPlane,
  kNumPlanes,
  kFirstSegment,
  kNumSegments,
  kSrcBlockStride,
  kDstBlockStride,
  kSrcSlotStride,
  kDstSlotStride,
  kOuterCount,
  kOuterSrcStride,
  kOuterDstStride,
  kInnerCount,
  kInnerSrcStride,
  kInnerDstStride,
  kRunBytes,
  kFirstScale,
  kScalePlaneStep,
  kOuterScaleStep,
  kInnerScaleStep,
  kNumBoxColumns,
};

// Strides are any 64 bits, but what a kernel holds in 32 must fit.
constexpr std::array<std::pair<BoxColumn, const char*>, 10> kCounts{{
    {kFirstPlane, "first_plane"},
    {kNumPlanes, "num_planes"},
    {kFirstSegment, "first_segment"},
    {kNumSegments, "num_segments"},
    {kOuterCount, "outer_count"},
    {kInnerCount, "inner_count"},
    {kFirstScale, "first_scale"},
    {kScalePlaneStep, "scale_plane_step"},
    {kOuterScaleStep, "outer_scale_step"},
    {kInnerScaleStep, "inner_scale_step"},
}};

CopyBox read_box(const std::uint64_t* row, const std::string& box) {
  for (const auto& [column, name] : kCounts) {
    KVXFER_REQUIRE(row[column] <= kMaxCount,
                   box + ": " + name + " is " + name_of(row[column]) + "; use at most 2^32 - 1");
  }
  const auto count = [row](BoxColumn column) { return static_cast<std::uint32_t>(row[column]); };
  return {
      .first_plane = count(kFirstPlane),
      .num_planes = count(kNumPlanes),
      .first_segment = count(kFirstSegment),
      .num_segments = count(kNumSegments),
      .src_block_stride = row[kSrcBlockStride],
      .dst_block_stride = row[kDstBlockStride],
      .src_slot_stride = row[kSrcSlotStride],
      .dst_slot_stride = row[kDstSlotStride],
      .outer = {count(kOuterCount), count(kOuterScaleStep), row[kOuterSrcStride],
                row[kOuterDstStride]},
      .inner = {count(kInnerCount), count(kInnerScaleStep), row[kInnerSrcStride],
                row[kInnerDstStride]},
      .run_bytes = row[kRunBytes],
      .first_scale = count(kFirstScale),
      .scale_plane_step = count(kScalePlaneStep),
  };
}

void require_range(std::uint64_t first, std::uint64_t count, std::uint64_t limit,
                   const std::string& what) {
  KVXFER_REQUIRE(first + count <= limit, what + " " + name_of(first) + " to " +
                                             name_of(first + count) + " of a table of " +
                                             name_of(limit));
}

void require_scales(const CopyBox& box, std::uint32_t num_scales, const std::string& name) {
  KVXFER_REQUIRE(box.run_bytes % 2 == 0, name + ": run_bytes is " + name_of(box.run_bytes) +
                                             "; a conversion takes whole elements of 2 bytes");
  if (box.num_pages() == 0) return;
  const Wide last = Wide{box.first_scale} + Wide{box.num_planes - 1} * box.scale_plane_step +
                    Wide{box.outer.count - 1} * box.outer.scale_step +
                    Wide{box.inner.count - 1} * box.inner.scale_step;
  KVXFER_REQUIRE(last < num_scales,
                 name + ": its last scale is entry " +
                     name_of(static_cast<std::uint64_t>(std::min<Wide>(last, ~0ull))) +
                     " of a table of " + name_of(num_scales));
}

void require_box(const CopyBox& box, const CopyPlan& plan, const std::string& name) {
  require_range(box.first_plane, box.num_planes, plan.num_planes, name + ": planes");
  require_range(box.first_segment, box.num_segments, plan.num_segments, name + ": segments");
  KVXFER_REQUIRE(box.outer.count > 0 && box.inner.count > 0,
                 name + ": " + name_of(box.outer.count) + " x " + name_of(box.inner.count) +
                     " rows; use 1 or more of each");
  KVXFER_REQUIRE(box.run_bytes > 0 && box.run_bytes <= kLimit,
                 name + ": run_bytes is " + name_of(box.run_bytes) + "; use 1 to 2^62");
  if (plan.conversion != Conversion::kNone) require_scales(box, plan.num_scales, name);
}

/// The bytes of a box at the source, up to one more than kLimit.
std::uint64_t bounded_bytes(const CopyBox& box) {
  const Wide pages = box.num_pages();
  const Wide runs = std::min<Wide>(pages * box.num_rows(), kLimit + 1);
  return static_cast<std::uint64_t>(std::min<Wide>(runs * box.run_bytes, kLimit + 1));
}

}  // namespace

PlanTables::PlanTables(Table<std::uint64_t> src_planes, Table<std::uint64_t> dst_planes,
                       Table<std::uint32_t> segments, const Table<std::uint64_t>& boxes,
                       Table<float> inverse_scales, const std::string& conversion)
    : src_planes_(std::move(src_planes)),
      dst_planes_(std::move(dst_planes)),
      segments_(std::move(segments)),
      inverse_scales_(std::move(inverse_scales)) {
  static_assert(sizeof(Segment) == 4 * sizeof(std::uint32_t), "a row of the table is a Segment");
  plan_ = {
      .src_planes = src_planes_.data(),
      .dst_planes = dst_planes_.data(),
      .segments = reinterpret_cast<const Segment*>(segments_.data()),
      .boxes = nullptr,
      .inverse_scales = inverse_scales_.data(),
      .num_planes = common_length(src_planes_, dst_planes_, "planes"),
      .num_segments = num_rows(segments_, 4, "segments"),
      .num_boxes = num_rows(boxes, kNumBoxColumns, "boxes"),
      .num_scales = length(inverse_scales_, "inverse scales"),
      .conversion = parse_conversion(conversion),
  };
  std::uint64_t total_bytes = 0;
  boxes_.reserve(plan_.num_boxes);
  for (std::uint32_t index = 0; index < plan_.num_boxes; ++index) {
    const std::string name = "box " + name_of(index);
    boxes_.push_back(read_box(boxes.data(index, 0), name));
    require_box(boxes_.back(), plan_, name);
    total_bytes += bounded_bytes(boxes_.back());
    KVXFER_REQUIRE(total_bytes <= kLimit, name + " takes the plan beyond 2^62 bytes");
  }
  plan_.boxes = boxes_.data();
}

PatternTables::PatternTables(Table<std::uint64_t> planes, Table<std::uint64_t> plane_keys,
                             Table<std::uint64_t> offsets, Table<std::uint64_t> token_keys,
                             Table<std::uint32_t> token_counts, std::uint64_t token_stride,
                             std::uint64_t head_stride, std::uint32_t num_heads,
                             std::uint32_t first_head, std::uint64_t vector_bytes,
                             const std::string& conversion,
                             const std::optional<Table<float>>& inverse_scales)
    : planes_(std::move(planes)),
      plane_keys_(std::move(plane_keys)),
      offsets_(std::move(offsets)),
      token_keys_(std::move(token_keys)),
      token_counts_(std::move(token_counts)),
      inverse_scales_(inverse_scales.value_or(Table<float>(0))) {
  pages_ = {
      .planes = planes_.data(),
      .plane_keys = plane_keys_.data(),
      .offsets = offsets_.data(),
      .token_keys = token_keys_.data(),
      .token_counts = token_counts_.data(),
      .inverse_scales = inverse_scales_.data(),
      .num_planes = common_length(planes_, plane_keys_, "planes"),
      .num_segments = common_length(offsets_, token_keys_, "segments"),
      .token_stride = token_stride,
      .head_stride = head_stride,
      .num_heads = num_heads,
      .first_head = first_head,
      .vector_bytes = vector_bytes,
      .conversion = parse_conversion(conversion),
  };
  (void)common_length(offsets_, token_counts_, "segments");
  KVXFER_REQUIRE(num_heads > 0 && std::uint64_t{first_head} + num_heads <= PatternPages::kMaxHeads,
                 "heads " + name_of(first_head) + " to " +
                     name_of(std::uint64_t{first_head} + num_heads) + "; use 1 or more below " +
                     name_of(PatternPages::kMaxHeads));
  KVXFER_REQUIRE(vector_bytes > 0 && vector_bytes % 2 == 0 && vector_bytes <= kLimit,
                 "a vector of " + name_of(vector_bytes) + " bytes; use a multiple of 2");
  const std::uint64_t scales_needed = std::uint64_t{pages_.num_planes} * num_heads;
  const std::uint64_t num_scales = length(inverse_scales_, "inverse scales");
  const bool may_lack = pages_.conversion == Conversion::kNone && num_scales == 0;
  KVXFER_REQUIRE(may_lack || num_scales == scales_needed,
                 name_of(num_scales) + " inverse scales for " + name_of(pages_.num_planes) +
                     " planes of " + name_of(num_heads) + " heads; give one of each");
  for (std::uint32_t segment = 0; segment < pages_.num_segments; ++segment) {
    const Wide words = Wide{pages_.token_counts[segment]} * num_heads * pages_.words_per_vector();
    KVXFER_REQUIRE(words <= kMaxPageWords,
                   "segment " + name_of(segment) + " has 2^32 words or more in a plane; cut it");
  }
}

}  // namespace kvxfer::bindings
