//! Abilities that not every back end has.

use core::fmt;

/// One of the [`Capabilities`](crate::Capabilities).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Capability {
    /// [`Capabilities::hitless_cut`](crate::Capabilities::hitless_cut).
    HitlessCut,
    /// [`Capabilities::unmap_part`](crate::Capabilities::unmap_part).
    UnmapPart,
    /// [`Capabilities::shares_pins`](crate::Capabilities::shares_pins).
    SharesPins,
    /// [`Capabilities::page_dirty`](crate::Capabilities::page_dirty).
    PageDirty,
    /// [`Capabilities::fixed_runs`](crate::Capabilities::fixed_runs).
    FixedRuns,
    /// [`Capabilities::table_placement`](crate::Capabilities::table_placement).
    TablePlacement,
    /// [`Capabilities::node_tables`](crate::Capabilities::node_tables).
    NodeTables,
}

impl Capability {
    /// Its name, that of the field of [`Capabilities`](crate::Capabilities).
    pub const fn name(self) -> &'static str {
        match self {
            Self::HitlessCut => "hitless_cut",
            Self::UnmapPart => "unmap_part",
            Self::SharesPins => "shares_pins",
            Self::PageDirty => "page_dirty",
            Self::FixedRuns => "fixed_runs",
            Self::TablePlacement => "table_placement",
            Self::NodeTables => "node_tables",
        }
    }
}

/// Formats a missing capability, to follow "cannot".
impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::HitlessCut => "cut a mapping without a moment in which the rest is missing",
            Self::UnmapPart => "unmap a part of a mapping",
            Self::SharesPins => "charge memory once that is mapped more than once",
            Self::PageDirty => "report dirty pages",
            Self::FixedRuns => "map memory that is not in this process",
            Self::TablePlacement => "choose where its tables lie, and their leaves",
            Self::NodeTables => "have a table for each node without charging memory for each",
        })
    }
}

/// A back end cannot do what was asked for. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{backend} cannot {what}")]
pub struct Unsupported {
    /// The missing capability.
    pub what: Capability,
    /// Its name.
    pub backend: &'static str,
}
