//! The semantics of mapping, by rows: what the kernel's interfaces answer, and what this library does
//! over each of its back ends.
//!
//! A row ([`rows()`]) says what a container of VFIO's type 1, one that iommufd plays, and an address
//! space of iommufd answer. The kernel's calls of a row are made to a plain model of it, and in the
//! guests to the real one. Then the library does the same thing over each back end, with errors that
//! must have the same number ([`ioas::MapError::errno`] and its like). Where the library differs on
//! purpose, the row says so. `docs/semantics.md` shows the rows.
//!
//! Not rows, since this library has no way to make them: unknown flags and short structures; the first version of the
//! container.
//!
//! This module is part of two programs: the tests of `ioas`, and the guests' (`conformance/guest`).

mod row;
mod rows;
mod subject;

pub(crate) use row::Column;
pub(crate) use rows::rows;
pub(crate) use subject::{
    Answer, BAD, LIMIT, MEMORY, NARROW, PAGE, RESERVED, Raw, Subject, Surroundings, Which,
};
