//! A table memory that does not do what it says.

/// The table memory broke its contract ([`TableMemory`](crate::TableMemory)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BrokenMemory {
    /// It set fewer tables aside than it said. Nothing was changed.
    #[error(
        "the table memory broke its contract: it set {given} tables aside where {wanted} were asked for"
    )]
    Reserve {
        /// The tables that were asked for.
        wanted: u64,
        /// The tables that came.
        given: u64,
    },
    /// It did not give the entries of a table, or gave other entries than shortly before. How much of
    /// the operation was done is not known. Every later operation on the table that looks at more than
    /// one page is refused with the same error; what is left to do is to detach the table everywhere
    /// and to tear it down, before anything is given back that it maps.
    #[error(
        "the table memory broke its contract: the table at {address:#x}, level {level}, is not what it was planned with"
    )]
    Table {
        /// Where the table lies.
        address: u64,
        /// Its level; 0 is that of the smallest page.
        level: u8,
    },
}
