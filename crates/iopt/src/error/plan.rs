//! An operation that does not find what it was planned with.

/// An operation does not find what it was planned with. The first two are a breach of its contract by the table memory
/// ([`TableMemory`](crate::TableMemory)); of the third it cannot be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BrokenPlan {
    /// The table memory set fewer tables aside than it said. Nothing was changed.
    #[error(
        "the table memory broke its contract: it set {given} tables aside where {wanted} were asked for"
    )]
    Reserve {
        /// The tables that were asked for.
        wanted: u64,
        /// The tables that came.
        given: u64,
    },
    /// The table memory did not give all entries of a table. How much of
    /// the operation was done is not known. Every later operation on the table that looks at more than
    /// one page is refused with the same error; what is left to do is to detach the table everywhere
    /// and to tear it down, before anything is given back that it maps.
    #[error(
        "the table memory broke its contract: it did not give all entries of the table at {address:#x}, level {level}"
    )]
    Entries {
        /// Where the table lies.
        address: u64,
        /// Its level; 0 is that of the smallest page.
        level: u8,
    },
    /// A table is not what it was when the operation was planned, or takes more tables than were planned: the table
    /// memory gave other entries than before, the caller let two operations change one range, or the engine has
    /// miscounted. It leaves the table as [`Entries`](Self::Entries) does.
    #[error(
        "the table at {address:#x}, level {level}, is not what the operation was planned with: the table memory or \
         another operation changed it, or the engine has miscounted"
    )]
    Mismatch {
        /// Where the table lies.
        address: u64,
        /// Its level; 0 is that of the smallest page.
        level: u8,
    },
}
