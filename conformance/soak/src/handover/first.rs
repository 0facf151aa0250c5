//! The side of the first owner.

use std::ffi::OsString;
use std::io::BufReader;
use std::os::fd::AsRawFd;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use hostmem::Mapping;
use ioas::{Cause, Handover, Ioas};
use iommu::{DeviceId, DomainId, Unit};
use iopt::AnyTable;
use runs::Span;

use super::{hear, numbers, place, say};
use crate::hardware::{Tables, UNITS, again, takeover};
use crate::world::{World, balloon, builder};

/// How long devices look at the hole that the second process has cut.
const LOOK: Duration = Duration::from_millis(5);

/// Where another process finds a memory file of this one.
fn path(file: &Mapping) -> String {
    let fd = file.fd().map_or(-1, |fd| fd.as_raw_fd());
    format!("/proc/{}/fd/{fd}", std::process::id())
}

/// The second process. Dropped, it is ended, if it has not done that by itself.
struct Second {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Drop for Second {
    fn drop(&mut self) {
        // Without an error where it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Second {
    fn start(command: &[OsString]) -> Result<Self, Cause> {
        let (program, arguments) = command.split_first().ok_or("no program")?;
        let mut child = Command::new(program)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        Ok(Self {
            child,
            input: input.ok_or("no pipe")?,
            output: BufReader::new(output.ok_or("no pipe")?),
        })
    }

    fn say(&mut self, line: &str) -> Result<(), Cause> {
        Ok(say(&mut self.input, line)?)
    }

    /// Answers for units and memory until the second process says `until`; returns that line, which has
    /// no answer yet.
    fn serve(&mut self, world: &World, until: &str) -> Result<String, Cause> {
        loop {
            let line = hear(&mut self.output)?;
            let what = line.split_whitespace().next().unwrap_or_default();
            if what == until {
                return Ok(line);
            }
            let answer = match world.serve(what, &numbers(&line)?) {
                Some(Ok(())) => "ok".into(),
                Some(Err(cause)) => format!("error {cause}"),
                None => return Err(format!("the second process says `{line}`").into()),
            };
            self.say(&answer)?;
        }
    }
}

impl World {
    /// What the second process asks of units and memory.
    fn serve(&self, what: &str, numbers: &[u64]) -> Option<Result<(), String>> {
        match (what, numbers) {
            ("pin" | "unpin", &[memory, start, len]) => {
                let part = Span::new(start, len);
                self.physical.note(memory as usize, part, what == "pin");
                Some(Ok(()))
            }
            ("invalidate", &[unit, domain, levels, tables, ref ranges @ ..]) => {
                let (ranges, _) = ranges.as_chunks::<2>();
                let ranges: Vec<Span> = ranges
                    .iter()
                    .map(|[at, len]| Span::new(*at, *len))
                    .collect();
                let (domain, levels) = (DomainId(domain as u32), levels as u32);
                let unit = self.units.get(unit as usize)?;
                let done = unit.invalidate_ranges(domain, &ranges, levels, tables != 0);
                Some(done.map_err(|cause| cause.to_string()))
            }
            ("invalidate-domain", &[unit, domain]) => {
                let unit = self.units.get(unit as usize)?;
                let done = unit.invalidate_domain(DomainId(domain as u32));
                Some(done.map_err(|cause| cause.to_string()))
            }
            _ => None,
        }
    }

    /// The address space goes to a second process, which cuts a hole and closes it, and comes back.
    pub(crate) fn hand_over(&mut self, command: &[OsString]) -> Result<(), Cause> {
        let Some(area) = self.some_area(ioas::Area::is_there) else {
            return Ok(());
        };
        if !self.model.is_live() {
            return Ok(());
        }
        self.faults.disarm();
        let hole = self.some_part(area);
        let mut second = Second::start(command)?;
        for mapping in &self.mappings {
            second.say(&format!("memory {}", path(mapping)))?;
        }
        second.say(&format!("tables {}", path(&self.file)))?;
        second.say(&format!("hole {} {}", hole.start, hole.len))?;
        self.there(&mut second)?;
        self.settle([]);
        self.hole(&mut second, hole)?;
        self.and_back(&mut second)?;
        second.say("ok")?;
        let left = second.serve(self, "left")?;
        if numbers::<u64>(&left)? != [0] {
            return Err(format!("the second process has `{left}` bytes charged").into());
        }
        second.say("ok")?;
        let status = second.child.wait()?;
        if !status.success() {
            return Err(format!("the second process: {status}").into());
        }
        self.note("hand over", &format!("hole {hole}"), Ok(()));
        Ok(())
    }

    fn there(&mut self, second: &mut Second) -> Result<(), Cause> {
        let leaving = self.space.hand_over(&self.memories)?;
        second.say(&format!("handover {}", leaving.handover()))?;
        second.serve(self, "adopted")?;
        leaving.give_up()?;
        let left = self.ledger.in_use();
        if left > 0 {
            return Err(format!("{left} bytes are charged to the owner that left").into());
        }
        second.say("ok")
    }

    fn hole(&mut self, second: &mut Second, hole: Span) -> Result<(), Cause> {
        let pages = Self::pages_of(hole);
        second.serve(self, "opening")?;
        self.moving(pages.clone());
        second.say("ok")?;
        second.serve(self, "opened")?;
        self.model.change(pages.clone(), |page| page.out = true);
        self.settle(pages.clone());
        thread::sleep(LOOK);
        self.moving(pages.clone());
        second.say("ok")?;
        second.serve(self, "closed")?;
        self.model.change(pages.clone(), |page| page.out = false);
        self.settle(pages);
        second.say("ok")
    }

    fn and_back(&mut self, second: &mut Second) -> Result<(), Cause> {
        let line = second.serve(self, "back")?;
        let (_, described) = line.split_once(' ').ok_or("no handover")?;
        let handover: Handover = described.parse()?;
        let mut takeover = takeover(again(&self.file)?)?;
        let mut adopted = Vec::new();
        for domain in &handover.domains {
            let (root, sizes) = (domain.root, domain.page_sizes);
            adopted.push(AnyTable::adopt(&mut takeover, root, sizes)?);
        }
        let tables = Tables::new(takeover.finish(), &self.faults);
        let mut taken = Vec::new();
        for (domain, adopted) in handover.domains.iter().zip(adopted) {
            let member = |device: &DeviceId| {
                let unit = &self.rigged[place(*device) % UNITS.len()];
                (Arc::clone(unit) as Arc<dyn Unit>, *device)
            };
            let members = domain.devices.iter().map(member).collect();
            taken.push((adopted.open(tables.clone())?, members));
        }
        let builder = Box::new(builder(&tables, &self.ids));
        let space = Ioas::adopt(&handover, &self.memories, taken, Some(builder), &mut ())?;
        self.space = Arc::new(space);
        self.dma = balloon(&self.memories, &self.space);
        self.tables = tables;
        Ok(())
    }
}
