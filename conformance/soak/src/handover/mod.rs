//! The address space goes to a second process and comes back, while devices go on.
//!
//! Units, devices and the memory behind them stay in the first process, as hardware would; the second asks
//! for them by lines on a pipe, and is answered by `ok` or `error`. Both ways the address space is described
//! by the same lines.

mod first;
mod second;

use std::io::{self, BufRead, Write};
use std::str::FromStr;

use ioas::Cause;

use crate::hardware::{DEVICES, device};

pub use second::succeed;

fn say(to: &mut impl Write, line: &str) -> io::Result<()> {
    writeln!(to, "{line}")?;
    to.flush()
}

fn hear(from: &mut impl BufRead) -> Result<String, Cause> {
    let mut line = String::new();
    if from.read_line(&mut line)? == 0 {
        return Err("the other process has gone".into());
    }
    Ok(line.trim_end().into())
}

/// The numbers in a line, behind its first word.
fn numbers<T: FromStr>(line: &str) -> Result<Vec<T>, Cause>
where
    T::Err: Into<Cause>,
{
    let words = line.split_whitespace().skip(1);
    words.map(|word| word.parse().map_err(Into::into)).collect()
}

/// The device with this place in [`DEVICES`], and that place of a device.
fn place(of: iommu::DeviceId) -> usize {
    let mut all = 0..DEVICES;
    all.find(|number| device(*number) == of).unwrap_or(0)
}
