//! Answers of `dmaspace tables walk` for a dump of the machine's memory, with the unit as the judge: an access
//! arrives where the walk says, or faults where it says so, for the reason that the unit reports.

use std::{collections::HashSet, path::Path, process::Command};

use anyhow::{Context as _, bail, ensure};
use fastrand::Rng;
use iommu::{Fault, FaultReason};
use iopt::{FormatId, Prot, walk::Access};
use runs::Span;
use serde_json::Value;

use super::suite::{GIB, page, reserved, sizes, stretches};
use crate::{At, Board, Rig, Seen, case::Case, tables::Tables};

/// Pages that are asked for beside the ends of all leaves.
const ANYWHERE: u64 = 8;

/// The device that does DMA.
const DEVICE: usize = 0;

/// The unit and the tables that it walks; each address leads as far from `address` as it is from `base`.
struct Judge<'r> {
    rig: &'r Rig,
    case: Case<'r>,
    table: Tables,
    base: u64,
    address: u64,
    /// A page that may be read and written.
    control: At,
    /// Leaves that the unit may have cached, by their first address.
    touched: HashSet<u64>,
    arrived: u64,
    faulted: u64,
}

/// Leaves of each size, half of them read-only; a page that may only be written; holes between them.
pub(super) fn walks(rig: &Rig) -> anyhow::Result<()> {
    let case = Case::new(rig)?;
    let table = case.table()?;
    let page = page(&table);
    let stretch = *stretches(&case, &table).first().context("no addresses")?;
    let (base, address) = (stretch.0, (rig.data().start + GIB).next_multiple_of(GIB));
    let at = |offset| At {
        iova: base + offset,
        address: address + offset,
    };
    // Leaves of each size, at twice itself, so that none meets another.
    let mut sizes = sizes(&table, GIB);
    sizes.retain(|size| size * 4 - 1 <= stretch.1 - stretch.0);
    let largest = *sizes.last().context("no sizes")?;
    let mut leaves = vec![(page, page, Prot::WRITE)];
    for size in sizes {
        leaves.extend([(2 * size, size, Prot::RW), (3 * size, size, Prot::READ)]);
    }
    leaves.retain(|(_, _, prot)| table.expresses(*prot));
    let mut questions = vec![0, page - 4096];
    for (offset, size, prot) in leaves {
        let leaf = at(offset);
        table.map(leaf.iova, &[Span::new(leaf.address, size)], prot)?;
        let found = table.leaf_at(leaf.iova).context("no leaf")?;
        ensure!(found.run.len == size, "{found:?} for {size:#x}");
        questions.extend([offset, offset + size - 4096]);
    }
    let mut random = Rng::with_seed(17);
    let pages = 4 * largest / 4096;
    questions.extend((0..ANYWHERE).map(|_| random.u64(..pages) * 4096));
    case.attach(DEVICE, 12, &table)?;

    let (file, offset) = rig.dump()?;
    let place = place(&table, offset);
    let mut judge = Judge {
        rig,
        case,
        table,
        base,
        address,
        control: at(3 * largest - 4096),
        touched: HashSet::new(),
        arrived: 0,
        faulted: 0,
    };
    for offset in questions {
        let iova = base + offset;
        if !reserved(&judge.case, iova) && iova & !0xfff != judge.control.iova {
            let said = walk(rig.dmaspace(), &file, iova, &place)?;
            let context = || format!("{iova:#x}, {said}");
            judge.hears(iova, &said).with_context(context)?;
        }
    }
    let (arrived, faulted) = (judge.arrived, judge.faulted);
    ensure!(arrived >= 8 && faulted >= 8, "{arrived} and {faulted} only");
    judge.case.detach(DEVICE)?;
    judge.case.end()
}

/// Options of the command line for the table in a dump from `offset` on.
fn place(table: &Tables, offset: u64) -> Vec<String> {
    let root = table.root();
    let mut options = vec![
        format!("--format={}", root.format.name()),
        format!("--root={:#x}", root.address),
        format!("--levels={}", root.levels),
        format!("--offset={offset:#x}"),
    ];
    if let FormatId::ArmStage1(config) | FormatId::ArmStage2(config) = root.format {
        options.push(format!("--input-bits={}", config.input_bits));
        options.extend(config.upper.then(|| "--upper".to_owned()));
    }
    options
}

/// Answer of the command line for one address.
fn walk(program: &Path, file: &Path, iova: u64, place: &[String]) -> anyhow::Result<Value> {
    let mut command = Command::new(program);
    command.args(["tables", "walk", "--json"]).args(place);
    let output = command.arg(file).arg(format!("{iova:#x}")).output();
    let output = output.with_context(|| program.display().to_string())?;
    ensure!(
        output.status.success(),
        String::from_utf8_lossy(&output.stderr).into_owned()
    );
    Ok(serde_json::from_slice(&output.stdout)?)
}

impl Judge<'_> {
    /// Has the device write and read there.
    fn hears(&mut self, iova: u64, said: &Value) -> anyhow::Result<()> {
        for (access, name) in [(Access::Write, "write"), (Access::Read, "read")] {
            let outcome = &said[name];
            match outcome["outcome"].as_str() {
                Some("translated") => {
                    let pa = outcome["pa"].as_str().and_then(|pa| pa.strip_prefix("0x"));
                    let pa = u64::from_str_radix(pa.context("no address")?, 16)?;
                    self.arrives(iova, access, pa)?;
                }
                Some("faults") => {
                    let event = outcome["event"]["name"].as_str();
                    self.faults(iova, access, event.context("no event")?)?;
                }
                _ => bail!("no outcome"),
            }
        }
        Ok(())
    }

    fn arrives(&mut self, iova: u64, access: Access, address: u64) -> anyhow::Result<()> {
        let (at, control) = (At { iova, address }, self.control);
        let (from, to) = match access {
            Access::Write => (control, at),
            _ => (at, control),
        };
        self.case.copy_by(&self.table, DEVICE, from, to)?;
        self.arrived += 1;
        let leaf = self.table.leaf_at(iova).context("no leaf")?;
        self.touched.insert(leaf.run.iova);
        Ok(())
    }

    fn faults(&mut self, iova: u64, access: Access, event: &str) -> anyhow::Result<()> {
        // Where it would be, if it were let through.
        let address = self.address + (iova - self.base);
        let (at, control) = (At { iova, address }, self.control);
        match access {
            Access::Write => self.case.copy(DEVICE, control, at, Seen::Untouched)?,
            _ => self.case.not_copied(DEVICE, at, control)?,
        }
        let recorded = match self.table.leaf_at(iova) {
            None => self.case.fault(DEVICE, iova, access)?,
            Some(leaf) => {
                let cached = self.touched.contains(&leaf.run.iova);
                self.case.denied(DEVICE, iova, access, cached)?
            }
        };
        self.faulted += 1;
        for fault in recorded {
            let reason = reason(self.rig.unit().board(), &fault)?;
            let mut words = event.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            ensure!(words.any(|word| word == reason), "{event:?}, but {fault}");
        }
        Ok(())
    }
}

/// Reported reason, as the word that an event has for it.
fn reason(board: Board, fault: &Fault) -> anyhow::Result<String> {
    let FaultReason::Reported { code, meaning, .. } = fault.reason else {
        bail!("{fault}");
    };
    Ok(match board {
        Board::RiscvVirt => code.to_string(),
        Board::ArmVirt => format!("{code:#04x}"),
        // AMD's codes have flags, and names.
        Board::Q35 => match meaning.split_once(':') {
            Some((name, _)) => name.into(),
            None => format!("{code:#x}"),
        },
    })
}
