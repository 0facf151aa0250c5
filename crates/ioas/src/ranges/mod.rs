//! Structures of ranges, which know nothing of memory: an interval tree, a map that joins neighbours, ranges under way,
//! windows for mappings.

pub(crate) mod extents;
pub(crate) mod intervals;
pub(crate) mod range_map;
pub(crate) mod windows;
