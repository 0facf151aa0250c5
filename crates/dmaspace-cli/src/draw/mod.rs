//! Text of reports.

pub(crate) mod sheet;
pub(crate) mod terminal;
