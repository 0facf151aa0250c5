//! The reader: which decoder a line is for, and which records wait for further lines.

use super::text::{Text as _, after, cut, head, number};
use super::{
    Dump, Family, FaultRecord, LogEvent, Note, Suppressed, amdvi, others, riscv, smmu, smmuv3, vtd,
};

/// Records that wait for further lines at the same time: more units than one log has at work at once.
const MOST_PENDING: usize = 16;

/// Lines, of any source, that may stand between two lines of one record.
const REACH: u64 = 256;

/// Lines of one record: further ones are left out of its list.
const MOST_LINES: usize = 32;

/// Lines of others that may stand within a wrapped one.
const OPEN_REACH: u64 = 3;

/// Bytes of each part of a wrapped line.
const MOST_OPEN: usize = 400;

/// Bytes of a message in which a driver's prefix is looked for.
const PREFIX: usize = 80;

/// Decodes a log message by message.
#[derive(Debug, Default)]
pub struct Reader {
    state: State,
    /// A line whose end is missing.
    open: Option<Open>,
}

/// Line that was wrapped, or cut.
#[derive(Debug)]
struct Open {
    text: String,
    number: u64,
    time: Option<f64>,
    since: u64,
    mark: Mark,
}

/// Message that is decoded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Line<'t> {
    pub(super) text: &'t str,
    pub(crate) number: u64,
    pub(crate) time: Option<f64>,
    /// The line that the message goes on in, where a line was wrapped.
    wrapped: Option<u64>,
}

impl Line<'_> {
    /// Numbers of the message's lines.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = u64> + use<> {
        [Some(self.number), self.wrapped].into_iter().flatten()
    }
}

/// Records that wait.
#[derive(Debug, Default)]
pub(super) struct State {
    pending: Vec<Pending>,
    /// The dump that is under way, and the line at which it began, by the count of lines.
    dump: Option<(Box<Dump>, u64)>,
    /// Messages so far.
    count: u64,
}

/// Further lines that a record waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    /// VT-d: the line with the reason.
    Reason,
    /// VT-d: the commands around an error of the invalidation queue.
    Commands,
    /// The page request after the reason that refused it.
    PageRequest,
    /// AMD-Vi: the device of an event.
    Device,
    /// AMD-Vi: words of the device's entry, or of a command.
    Entry,
    /// AMD-Vi: the command buffer.
    CommandBuffer,
    /// SMMUv3: words, and decoded lines.
    Event,
    /// SMMUv3: further lines of an error.
    Command,
    /// SMMUv2: registers of a context bank.
    Context,
    /// SMMUv2: registers of a global fault.
    Global,
    /// `msm_iommu`: registers.
    Msm,
    /// Rockchip, Allwinner: entries of the walk.
    Walk,
    /// PAMU: registers.
    Pamu,
    /// Exynos: the kernel's stop for the fault.
    Panic,
    /// Tegra: the second status of the same fault.
    Status,
    /// SMMUv2: the state of translation buffers after a time-out.
    Sync,
}

/// Record that waits.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) wait: Wait,
    pub(super) record: Box<FaultRecord>,
    /// Lines so far of those that are counted: words of an event.
    pub(super) step: u32,
    since: u64,
}

impl Pending {
    /// Adds a line.
    pub(super) fn add(&mut self, line: Line<'_>) {
        add_line(&mut self.record.lines, line);
    }
}

impl State {
    /// Emits a record that is complete.
    pub(super) fn emit(record: FaultRecord, out: &mut Vec<LogEvent>) {
        out.push(LogEvent::Fault(Box::new(record)));
    }

    /// Lets a record wait.
    pub(super) fn wait(&mut self, wait: Wait, record: FaultRecord, out: &mut Vec<LogEvent>) {
        if self.pending.len() >= MOST_PENDING {
            let oldest = self.pending.remove(0);
            out.push(LogEvent::Fault(oldest.record));
        }
        self.pending.push(Pending {
            wait,
            record: Box::new(record),
            step: 0,
            since: self.count,
        });
    }

    /// The record that waits for this; with a unit's name, that of this unit.
    pub(super) fn waiting(&mut self, wait: Wait, unit: Option<&str>) -> Option<&mut Pending> {
        let mut pending = self.pending.iter_mut().rev();
        pending.find(|pending| {
            pending.wait == wait && (unit.is_none() || pending.record.unit.as_deref() == unit)
        })
    }

    /// Adds a line to the record that waits for this; false: there is none.
    pub(super) fn join(
        &mut self,
        wait: Wait,
        unit: Option<&str>,
        line: Line<'_>,
        change: impl FnOnce(&mut FaultRecord),
    ) -> bool {
        match self.waiting(wait, unit) {
            Some(pending) => {
                pending.add(line);
                change(&mut pending.record);
                true
            }
            None => false,
        }
    }

    /// Emits the records that wait for this; with a unit's name, those of this unit.
    pub(super) fn complete(&mut self, wait: Wait, unit: Option<&str>, out: &mut Vec<LogEvent>) {
        self.release(out, |pending| {
            pending.wait == wait && (unit.is_none() || pending.record.unit.as_deref() == unit)
        });
    }

    /// Emits the records for which `complete` holds.
    fn release(&mut self, out: &mut Vec<LogEvent>, complete: impl Fn(&Pending) -> bool) {
        let mut at = 0;
        while let Some(pending) = self.pending.get(at) {
            if complete(pending) {
                out.push(LogEvent::Fault(self.pending.remove(at).record));
            } else {
                at += 1;
            }
        }
    }

    /// Begins a dump; the one before is complete.
    pub(super) fn begin_dump(&mut self, dump: Dump, out: &mut Vec<LogEvent>) {
        self.complete_dump(out);
        self.dump = Some((Box::new(dump), self.count));
    }

    /// The dump that is under way.
    pub(super) fn dump(&mut self) -> Option<&mut Dump> {
        self.dump.as_mut().map(|(dump, _)| &mut **dump)
    }

    /// Emits the dump that is under way.
    pub(super) fn complete_dump(&mut self, out: &mut Vec<LogEvent>) {
        if let Some((dump, _)) = self.dump.take() {
            out.push(LogEvent::Dump(dump));
        }
    }

    /// Emits records and a dump whose further lines have not come.
    fn expire(&mut self, out: &mut Vec<LogEvent>) {
        let count = self.count;
        let old = |since: u64| count - since > REACH;
        self.release(out, |pending| old(pending.since));
        if self.dump.as_ref().is_some_and(|(_, since)| old(*since)) {
            self.complete_dump(out);
        }
    }
}

/// Adds a line's number.
pub(super) fn add_line(lines: &mut Vec<u64>, line: Line<'_>) {
    let room = MOST_LINES.saturating_sub(lines.len());
    lines.extend(line.numbers().take(room));
}

impl Reader {
    /// A reader at the start of a log.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Decodes a message without its [transport's prefix](super::strip). Events are added to `out`, a record once its
    /// last line has come: an event of an earlier line may follow one of a later line.
    pub fn line(&mut self, text: &str, number: u64, time: Option<f64>, out: &mut Vec<LogEvent>) {
        self.state.count += 1;
        if !self.state.pending.is_empty() || self.state.dump.is_some() {
            self.state.expire(out);
        }
        if self.open.is_some() && self.go_on(text, number, out) {
            return;
        }
        let Some(mark) = mark(text) else {
            return;
        };
        // Documentation, or the source of the driver.
        if is_template(text) {
            return;
        }
        if unfinished(text, mark) {
            self.close(out);
            self.open = Some(Open {
                text: cut(text, MOST_OPEN).to_owned(),
                number,
                time,
                since: self.state.count,
                mark,
            });
            return;
        }
        let wrapped = None;
        self.decode(
            Line {
                text,
                number,
                time,
                wrapped,
            },
            mark,
            out,
        );
    }

    fn decode(&mut self, line: Line<'_>, mark: Mark, out: &mut Vec<LogEvent>) {
        let state = &mut self.state;
        let first = match mark {
            Mark::Vtd => vtd::decode(line, state, out),
            Mark::AmdVi => amdvi::decode(line, state, out),
            Mark::Limit => suppressed(line, out),
            Mark::Other => false,
        };
        let decoded = first
            || vtd::decode(line, state, out)
            || amdvi::decode(line, state, out)
            || smmuv3::decode(line, state, out)
            || smmu::decode(line, state, out)
            || riscv::decode(line, out)
            || others::decode(line, state, out);
        if decoded {
            return;
        }
        if let Some(family) = suspect(line.text) {
            out.push(LogEvent::Undecoded(note(Some(family), line)));
        }
    }

    /// Decodes a line that was wrapped together with its rest; false: `text` is another message.
    fn go_on(&mut self, text: &str, number: u64, out: &mut Vec<LogEvent>) -> bool {
        let Some(open) = &self.open else {
            return false;
        };
        let own = own_message(text);
        let rest = cut(text.trim_start(), MOST_OPEN);
        // A soft break of a mail, and a terminal, cut words; others wrap between them.
        let start = open.text.strip_suffix('=').unwrap_or(&open.text);
        let finished = |joined: &String| !unfinished(joined, open.mark);
        let between = || Some(format!("{} {rest}", open.text)).filter(finished);
        let within = || Some(format!("{start}{rest}")).filter(finished);
        let joined = if own { None } else { between().or_else(within) };
        let Some(joined) = joined else {
            if own || self.state.count - open.since > OPEN_REACH {
                self.close(out);
            }
            return false;
        };
        let line = Line {
            text: &joined,
            number: open.number,
            time: open.time,
            wrapped: Some(number),
        };
        self.open = None;
        self.decode(line, Mark::Other, out);
        true
    }

    /// Decodes a line that was wrapped, or cut, as it is.
    fn close(&mut self, out: &mut Vec<LogEvent>) {
        if let Some(open) = self.open.take() {
            let line = Line {
                text: &open.text,
                number: open.number,
                time: open.time,
                wrapped: None,
            };
            self.decode(line, Mark::Other, out);
        }
    }

    /// Emits the records that still wait, at the end of a log.
    pub fn finish(&mut self, out: &mut Vec<LogEvent>) {
        self.close(out);
        for pending in self.state.pending.drain(..) {
            out.push(LogEvent::Fault(pending.record));
        }
        self.state.complete_dump(out);
    }
}

/// A note of a line.
pub(super) fn note(family: Option<Family>, line: Line<'_>) -> Note {
    Note {
        family,
        text: cut(line.text, 400).to_owned(),
        line: line.number,
        time: line.time,
    }
}

/// Decoder of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mark {
    Vtd,
    AmdVi,
    Other,
    /// Messages of rate limits.
    Limit,
}

/// The decoder that may know the message. All others, which are nearly all of a log, are left at this.
fn mark(text: &str) -> Option<Mark> {
    let bytes = text.as_bytes();
    let bytes = bytes.get(..PREFIX).unwrap_or(bytes);
    let found = |at: usize, word: &[u8]| {
        let part = bytes.get(at..at + word.len());
        part.is_some_and(|part| part.eq_ignore_ascii_case(word))
    };
    let pairs = bytes.iter().zip(bytes.iter().skip(1)).enumerate();
    let marks = pairs.into_iter().find_map(|(at, (first, second))| {
        // Letters in lower case; it changes other signs, too, which the whole word then tells.
        match (first | 0x20, second | 0x20) {
            (b'm', b'm') => found(at, b"mmu").then_some(Mark::Other),
            (b'm', b'e') => found(at, b"memory-controller").then_some(Mark::Other),
            (b'd', b'm') => found(at, b"dmar").then_some(Mark::Vtd),
            (b'd', b'a') => found(at, b"dart").then_some(Mark::Other),
            (b'a', b'm') => found(at, b"amd-vi").then_some(Mark::AmdVi),
            (b'i', b'n') => found(at, b"intr-remap").then_some(Mark::Vtd),
            (b'i', _) => found(at, b"io_page_fault").then_some(Mark::AmdVi),
            (b'p', b'a') => found(at, b"pamu").then_some(Mark::Other),
            (b't', b'e') => found(at, b"tegra-mc").then_some(Mark::Other),
            (b'v', b'i') => found(at, b"vintf").then_some(Mark::Other),
            (b'v', b'c') => found(at, b"vcmdq").then_some(Mark::Other),
            (b'q', b'c') => found(at, b"qcom-tbu").then_some(Mark::Other),
            (b'{', b'f') => found(at, b"[fault reason").then_some(Mark::Vtd),
            (b'*', b'*') => found(at, b"*** gpu fault").then_some(Mark::Other),
            _ => None,
        }
    });
    let limit = || text.ends_with(" suppressed") || text.ends_with(" messages dropped **");
    if limit() { Some(Mark::Limit) } else { marks }
}

/// `FUNCTION: N callbacks suppressed`.
fn suppressed(line: Line<'_>, out: &mut Vec<LogEvent>) -> bool {
    if line.text.ends_with(" messages dropped **") {
        out.push(LogEvent::Overflow(note(None, line)));
        return true;
    }
    let Some(text) = line.text.strip_suffix(" callbacks suppressed") else {
        return false;
    };
    let Some((function, count)) = text.rsplit_once(": ") else {
        return false;
    };
    let Some((callbacks, "")) = number(count) else {
        return false;
    };
    let function = function.rsplit(' ').next().unwrap_or(function);
    let Some((family, faults, exact)) = limiter(function, callbacks) else {
        // A limiter of an unknown function of a unit's driver: what it kept back is not known.
        let lower = function.to_ascii_lowercase();
        let of_unit = ["iommu", "smmu", "dmar", "dart"];
        if of_unit.iter().any(|part| lower.contains(part)) {
            out.push(LogEvent::Undecoded(note(None, line)));
        }
        return true;
    };
    out.push(LogEvent::Suppressed(Suppressed {
        family,
        function: cut(function, 64).to_owned(),
        callbacks,
        faults,
        exact,
        line: line.number,
        time: line.time,
    }));
    true
}

/// The family of a function with a limiter, its faults among `callbacks`, and whether that is exact.
fn limiter(function: &str, callbacks: u64) -> Option<(Family, u64, bool)> {
    let once = |family| Some((family, callbacks, true));
    match function {
        // Asked for the status, for each record, and for the empty record at the end: at least a third are faults.
        "dmar_fault" => Some((Family::Vtd, callbacks / 3, false)),
        "amd_iommu_report_page_fault" | "amd_iommu_report_rmp_fault" => once(Family::AmdVi),
        "amd_iommu_report_rmp_hw_error" | "iommu_print_event" => once(Family::AmdVi),
        "arm_smmu_evtq_thread" | "arm_smmu_dump_event" | "arm_smmu_evtq_handler" => {
            once(Family::SmmuV3)
        }
        "arm_smmu_context_fault" | "arm_smmu_global_fault" | "qcom_smmu_context_fault" => {
            once(Family::SmmuV2)
        }
        "nvidia_smmu_context_fault_bank" | "nvidia_smmu_global_fault_inst" => once(Family::SmmuV2),
        "qcom_iommu_fault" => once(Family::Qualcomm),
        "riscv_iommu_fault" | "riscv_iommu_fltq_process" => once(Family::Riscv),
        "apple_dart_irq" | "apple_dart_t8020_irq" | "apple_dart_t8110_irq" => once(Family::Dart),
        "mtk_iommu_isr" => once(Family::MediaTek),
        "ipmmu_domain_irq" => once(Family::Ipmmu),
        "viommu_fault_handler" => once(Family::Virtio),
        "tegra20_mc_handle_irq" | "tegra30_mc_handle_irq" | "tegra_mc_irq" => once(Family::Tegra),
        _ => None,
    }
}

/// Drivers, by what their messages begin with.
const PREFIXES: &[(&str, Family)] = &[
    ("DMAR-IR:", Family::Vtd),
    ("DMAR:", Family::Vtd),
    ("dmar:", Family::Vtd),
    ("INTR-REMAP:", Family::Vtd),
    ("AMD-Vi:", Family::AmdVi),
    ("iommu ivhd", Family::AmdVi),
    ("arm-smmu-v3", Family::SmmuV3),
    ("arm-smmu", Family::SmmuV2),
    ("riscv-iommu", Family::Riscv),
    ("riscv,iommu", Family::Riscv),
    ("apple-dart", Family::Dart),
    ("rk_iommu", Family::Rockchip),
    ("rockchip-iommu", Family::Rockchip),
    ("sun50i-iommu", Family::Allwinner),
    ("mtk-iommu", Family::MediaTek),
    ("msm_iommu", Family::Qualcomm),
    ("qcom-iommu", Family::Qualcomm),
    ("qcom-tbu", Family::SmmuV2),
    ("exynos-sysmmu", Family::Exynos),
    ("tegra-mc", Family::Tegra),
    ("tegra-smmu", Family::Tegra),
    ("ipmmu-vmsa", Family::Ipmmu),
    ("omap-iommu", Family::Omap),
    ("virtio_iommu", Family::Virtio),
    ("sprd-iommu", Family::Sprd),
    ("vsi-iommu", Family::Verisilicon),
    ("vsi_iommu", Family::Verisilicon),
    ("fsl-pamu", Family::Pamu),
];

/// Words of messages that report a failure at work.
const WORDS: &[&str] = &[
    "fault",
    "error",
    "timeout",
    "timed out",
    "invalid ",
    "abort",
    "violation",
    "overflow",
    "unexpected",
    "unhandled",
];

/// True for a message that stands for many: it has conversions of `printf`, or letters in the place of numbers.
fn is_template(text: &str) -> bool {
    let bytes = text.as_bytes();
    let at = |place: usize| bytes.get(place).copied().unwrap_or_default();
    let places = bytes.iter().enumerate();
    let mut marks = places.filter(|(_, byte)| matches!(byte, b'%' | b'x' | b'X' | b'=' | b':'));
    marks.any(|(place, byte)| match byte {
        // %d, %04x, %llx, %#x, %pad
        b'%' => {
            let rest = bytes.get(place + 1..).unwrap_or_default();
            let flag = |byte: &&u8| matches!(byte, b'#' | b'l' | b'h' | b'.' | b'0'..=b'9');
            let end = rest.iter().take(8).take_while(flag).count();
            matches!(
                rest.get(end),
                Some(b'd' | b'u' | b'i' | b'x' | b'X' | b's' | b'p')
            )
        }
        // 0xADDR, 0xNN: a word of capitals that is no number.
        b'x' if place > 0 && at(place - 1) == b'0' => {
            let rest = bytes.get(place + 1..).unwrap_or_default();
            let word = rest.iter().take_while(|byte| byte.is_ascii_alphanumeric());
            let word: &[u8] = rest.get(..word.count()).unwrap_or_default();
            let capitals = word.iter().all(u8::is_ascii_uppercase);
            capitals && word.iter().any(|byte| !byte.is_ascii_hexdigit())
                || rest.starts_with(b"...")
                || rest.starts_with(b"<")
        }
        // xx:yy.z
        b'x' | b'X' => {
            let begins = place == 0 || !at(place - 1).is_ascii_alphanumeric();
            begins && at(place + 1) == *byte && at(place + 2) == b':'
        }
        // device=.. and sid: <sid>
        b'=' => at(place + 1) == b'<' || at(place + 1) == b'.' && at(place + 2) == b'.',
        b':' => {
            at(place + 1) == b' ' && at(place + 2) == b'<' && at(place + 3).is_ascii_alphabetic()
        }
        _ => false,
    })
}

/// The family of a driver's message that looks like a fault. One that tells of something switched on or off is none.
fn suspect(text: &str) -> Option<Family> {
    let family = prefix(text)?;
    let lower = cut(text, 400).to_ascii_lowercase();
    if lower.contains("enabl") || lower.contains("disabl") {
        return None;
    }
    WORDS
        .iter()
        .any(|word| lower.contains(word))
        .then_some(family)
}

/// The family whose driver's message it is.
fn prefix(text: &str) -> Option<Family> {
    let trimmed = text.trim_start();
    let begins = |(prefix, _): &&(&str, Family)| trimmed.starts_with(prefix);
    if let Some((_, family)) = PREFIXES.iter().find(begins) {
        return Some(*family);
    }
    // A device's driver and address, then AMD's own prefix.
    let (_, rest) = head(trimmed)?;
    rest.starts_with("AMD-Vi:").then_some(Family::AmdVi)
}

/// True for a message that cannot be the rest of another.
fn own_message(text: &str) -> bool {
    prefix(text).is_some()
}

/// True for a message of which a part is missing: wrapped by a terminal or in a mail, or printed in two parts.
fn unfinished(text: &str, mark: Mark) -> bool {
    match mark {
        Mark::Vtd => return unfinished_vtd(text),
        Mark::AmdVi => return unfinished_amdvi(text),
        _ => {}
    }
    if let Some((_, rest)) = text.around("nhandled context fault: ") {
        return !rest.has("cb=");
    }
    if let Some((_, rest)) = text.around(": event: ") {
        let addressed = ["F_TRANSLATION", "F_ADDR_SIZE", "F_ACCESS", "F_PERMISSION"];
        let address = !addressed.iter().any(|name| rest.starts_with(name)) || rest.has("iova: ");
        return text.has("smmu") && !(rest.has("ssid: ") && address);
    }
    if let Some((_, rest)) = text.around("translation fault: status:") {
        return !rest.has(") at ");
    }
    if let Some((_, rest)) = text.around(".memory-controller: ") {
        let start = rest.trim_end();
        return start.ends_with(": read")
            || start.ends_with(": write")
            || start.ends_with(':') && start.has(" @");
    }
    false
}

fn unfinished_amdvi(text: &str) -> bool {
    if let Some((_, event)) = text.around("vent logged [") {
        let known = ["address=", "gpa=", "spa=", "properly", "UNKNOWN"];
        return !event.contains(']') && !event.has("UNKNOWN")
            || !known.iter().any(|key| event.has(key));
    }
    false
}

fn unfinished_vtd(text: &str) -> bool {
    if let Some((_, rest)) = text.around("Request device [") {
        let address = rest.has("fault addr ") || rest.has("fault index ");
        let cut = after(rest, "[fault reason").is_some_and(|reason| !reason.contains(']'));
        return (!address || cut) && text.has("DMAR");
    }
    false
}
