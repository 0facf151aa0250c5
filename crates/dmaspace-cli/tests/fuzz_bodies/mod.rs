//! Bodies of the fuzz targets: `fuzz/` calls these functions with the bytes that it generates,
//! `tests/corpus.rs` with the ones it kept.
//!
//! Each takes any bytes, and panics when something does not hold, or when more is allocated for them than
//! is said.

#[path = "../../../../fuzz/src/bytes.rs"]
mod bytes;
mod machine;
mod tables;
mod text;

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;

use crate::allocated::within;

pub use bytes::{Bytes, Target};

/// All targets; the corpus of one lies in `fuzz/corpus/` under its name.
pub const TARGETS: [Target; 7] = [
    ("tables_file", tables::file),
    ("topology_file", text::topology),
    ("acpi_tables", text::acpi),
    ("proc_text", text::proc),
    ("machine_files", machine::files),
    ("command_line", command_line),
    ("explain_input", explain_input),
];

/// Arguments of any bytes, which zero bytes divide: understood, or refused with a text.
fn command_line(data: &[u8]) {
    let arguments = data.split(|byte| *byte == 0).map(OsStr::from_bytes);
    // The commands with their help are made anew each time; of an argument, copies in values and errors.
    within((4 << 20) + 256 * data.len() as u64, || {
        let all = std::iter::once(OsStr::new("dmaspace")).chain(arguments);
        if let Err(error) = dmaspace_cli::command().try_get_matches_from(all) {
            assert!(!error.to_string().is_empty());
        }
    });
}

/// A file of any bytes: explained in 80 columns and as JSON, without control characters, and with memory by what is
/// there.
fn explain_input(data: &[u8]) {
    // The automaton of words, once; facts of lines with their quotations and those of findings; and what a compressed
    // stream may ask for.
    let most = (512 << 20) - 1;
    let (text, json) = within(most, || dmaspace_cli::inside::explain_bytes("input", data));
    assert!(
        text.chars().all(|c| c == '\n' || !c.is_control()),
        "{text:?}"
    );
    assert!(json.starts_with("{\n  \"schema\": "), "{json}");
    assert!(json.is_ascii(), "{json}");
}
