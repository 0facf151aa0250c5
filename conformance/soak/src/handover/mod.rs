//! The address space goes to a second process and comes back, while devices go on.
//!
//! Units, devices and the memory behind them stay in the first process, as hardware would; the second asks
//! for them by lines on a pipe, and is answered by `ok` or `error`. Both ways the address space is described
//! by the same lines.

mod first;
mod second;

use std::io::{self, BufRead, Write};
use std::str::FromStr;

use ioas::{Cause, HandedArea, HandedDomain, Handover, Tracking};
use iommu::DomainId;
use iopt::{FormatId, Interruption, Prot, Root};
use runs::{PageSizes, Span};

use crate::hardware::{DEVICES, UNITS, capabilities, device};

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

fn described(handover: &Handover) -> Vec<String> {
    let mut lines = Vec::new();
    for domain in &handover.domains {
        let Root {
            format,
            address,
            levels,
        } = domain.root;
        let format = UNITS.iter().position(|(id, ..)| *id == format).unwrap_or(0);
        let (id, sizes) = (domain.id.0, domain.page_sizes.bits());
        let mut line = format!("domain {format} {id} {address} {levels} {sizes}");
        for device in &domain.devices {
            line += &format!(" {}", place(*device));
        }
        lines.push(line);
    }
    for area in &handover.areas {
        let (start, len, prot) = (area.range.start, area.range.len, area.prot.bits());
        let (out, released) = (u8::from(area.out), u8::from(area.released));
        let (memory, offset) = (area.memory, area.offset);
        let [low, high] = area.cut.map(u8::from);
        lines.push(format!(
            "area {start} {len} {memory} {offset} {prot} {out} {released} {low} {high}"
        ));
    }
    let written = handover.written.iter();
    lines.extend(written.map(|span| format!("written {} {}", span.start, span.len)));
    if let Some(tracking) = handover.tracking {
        lines.push(format!("tracking {}", tracking.leaf.unwrap_or(0)));
    }
    lines
}

/// Takes a line of a description in; false when it is none.
fn learn(handover: &mut Handover, line: &str) -> Result<bool, Cause> {
    let what = line.split_whitespace().next().unwrap_or_default();
    match (what, numbers::<u64>(line)?.as_slice()) {
        ("domain", [format, id, address, levels, sizes, devices @ ..]) => {
            let format: FormatId = UNITS.get(*format as usize).ok_or("no such format")?.0;
            let unit = *devices.first().ok_or("a domain without devices")? as usize % UNITS.len();
            handover.domains.push(HandedDomain {
                id: DomainId(*id as u32),
                root: Root {
                    format,
                    address: *address,
                    levels: *levels as u8,
                },
                page_sizes: PageSizes::from_bits(*sizes),
                coherent: Some(capabilities(unit).snoop_control),
                devices: devices.iter().map(|n| device(*n as usize)).collect(),
            });
        }
        ("area", [start, len, memory, offset, prot, out, released, low, high]) => {
            handover.areas.push(HandedArea {
                range: Span::new(*start, *len),
                memory: *memory as usize,
                offset: *offset,
                prot: Prot::from_bits(*prot as u32).ok_or("no such permissions")?,
                out: *out != 0,
                released: *released != 0,
                cut: [*low != 0, *high != 0],
            });
        }
        ("written", [start, len]) => handover.written.push(Span::new(*start, *len)),
        ("tracking", [leaf]) => {
            handover.tracking = Some(Tracking {
                leaf: (*leaf > 0).then_some(*leaf),
                interruption: Interruption::Refused,
            });
        }
        _ => return Ok(false),
    }
    Ok(true)
}
