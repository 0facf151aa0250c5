//! What the fuzz targets do with bytes: `fuzz/` calls these functions with whatever it comes upon,
//! `tests/corpus.rs` with what it came upon before.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;

use crate::allocated::within;

/// One target, and what it does with bytes: it panics when something does not hold.
pub type Target = (&'static str, fn(&[u8]));

/// All targets; the corpus of one lies in `fuzz/corpus/` under its name.
pub const TARGETS: [Target; 1] = [("command_line", command_line)];

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
