//! The kernel's charge for a registered buffer: whole folios.
//!
//! Source: Linux `io_uring/rsrc.c` (`io_buffer_account_pin`).

use runs::{Offset, Span};

use crate::backing::Backing;
use crate::mapping::Mapping;
use crate::nodes::open_pagemap;
use crate::stretches::{Pages, Stretches};

/// The kernel's charge for a pin of these parts, in bytes: whole huge pages at their ends.
pub(crate) fn charge(mapping: &Mapping, parts: &[Span<Offset>]) -> u64 {
    let huge = mapping.backing().largest_page();
    // Foreign memory need not begin where a huge page does.
    let base = mapping.lead();
    let mut charged_to = 0;
    let mut charge = 0;
    for part in parts {
        let mut start = base + part.start;
        let mut end = start + part.len;
        if start % huge != 0 && lies_in_huge(mapping, part.start) {
            start -= start % huge;
        }
        if end % huge != 0 && lies_in_huge(mapping, part.last() - 4095) {
            end = end.next_multiple_of(huge);
        }
        // Two parts may share a huge page.
        start = start.max(charged_to);
        charge += end.saturating_sub(start);
        charged_to = charged_to.max(end);
    }
    charge
}

/// Returns true if the page at `offset` is a part of a huge page.
fn lies_in_huge(mapping: &Mapping, offset: u64) -> bool {
    if mapping.backing() != Backing::Thp {
        return mapping.backing().huge_size().is_some();
    }
    let Ok(pagemap) = open_pagemap() else {
        return false;
    };
    let stretch = Stretches::new(mapping, Span::new(offset, 4096)).next(&pagemap);
    matches!(stretch, Ok(Some(stretch)) if stretch.pages == Pages::Huge)
}
