//! No text panics, and none makes a reader keep much.

use fastrand::Rng;

use crate::log::{LogEvent, Reader, strip};

const PARTS: &[&str] = &[
    "DMAR: ",
    "dmar: DMAR:",
    "[DMA Read] ",
    "[DMA Write PASID 0x",
    "Request device [",
    "[[",
    "00:1f.2",
    "]",
    " fault addr ",
    "[fault reason ",
    "06",
    "0x71",
    "INTR-REMAP:",
    "fault index ",
    "VT-d detected Invalidation Queue Error: Reason ",
    "QI HEAD: ",
    "qw0 = ",
    "Dump dmar0 table entries for IOVA ",
    "pte level: ",
    ", pte value: ",
    "page table not present at level ",
    "root entry: ",
    "context entry: hi ",
    "low ",
    "pasid table entry[",
    "AMD-Vi: ",
    "Event logged [",
    "IO_PAGE_FAULT ",
    "device=",
    "domain=",
    "address=",
    "flags=",
    "UNKNOWN event[0]=",
    "event[1]=",
    "RMP_PAGE_FAULT",
    "vmg_tag=",
    "DTE[0]: ",
    "CMD Buffer head=",
    "Completion-Wait loop timed out",
    "arm-smmu-v3 x: ",
    "event 0x10 received:",
    "0x0000000000000010",
    "event: F_TRANSLATION client: ",
    " sid: ",
    " ssid: ",
    " iova: ",
    "unpriv data write s1 \"",
    "\" stag: ",
    "unexpected global error reported (",
    "CMDQ error (cons ",
    "arm-smmu y: ",
    "Unhandled context fault: ",
    "fsr=",
    "iova=",
    "fsynr=",
    "cb=",
    "FSR    = ",
    "FSYNR0 = ",
    "GFSR ",
    "GFSYNR1 ",
    "riscv-iommu z: ",
    "Fault ",
    "devid: ",
    "iotval: ",
    "iotval2: ",
    "Queue #",
    "apple-dart d: ",
    "translation fault: status:",
    "stream:",
    "code:",
    "(",
    ") at ",
    "rk_iommu r: ",
    "Page fault at ",
    "of type ",
    "mmu_dte_addr: ",
    "dte@",
    "valid: ",
    "sun50i-iommu s: ",
    "Page fault for ",
    "mtk-iommu m: ",
    "fault type=",
    "larb=",
    "port=",
    "exynos-sysmmu e: ",
    "m: [READ] PAGE FAULT occurred at ",
    "tegra-mc t: ",
    "ipmmu-vmsa i: ",
    "Unhandled fault: status ",
    "omap-iommu o: ",
    "errs:",
    "da:",
    "*pgd:px",
    "virtio_iommu v: ",
    "page fault from EP ",
    "fsl-pamu: ",
    "AVS1=",
    "msm_iommu: ",
    "Fault occurred in context ",
    "FAR    = ",
    "dmar_fault: ",
    " callbacks suppressed",
    "*** gpu fault: ",
    "ffffffffffffffff",
    "18446744073709551616",
    "18446744073709551615",
    ":00:00 ",
    "2026-01-",
    "Jan ",
    "99999999999",
    "0x",
    "é",
    "\u{feff}",
    "\\x",
    "\\x09",
    "\\x0",
    "\x1b[3",
    "m",
    "[",
    "<",
    "Jan 31 23:59:60 ",
    "2026-13-99T",
    "6,1,2,-;",
    ":",
    ".",
    " ",
    "\t",
    "-",
    "\"",
    "error",
    "timeout",
];

#[test]
fn mixtures_of_parts_never_panic() {
    let mut random = Rng::with_seed(45);
    let mut reader = Reader::new();
    let mut events = Vec::new();
    for number in 0..200_000 {
        let mut text = String::new();
        for _ in 0..random.usize(1..14) {
            text.push_str(random.choice(PARTS).unwrap());
        }
        let message = strip(&text);
        reader.line(&message.text, number, message.time, &mut events);
        if number % 1000 == 0 {
            reader.finish(&mut events);
        }
        bounded(&mut events);
    }
}

#[test]
fn any_bytes_never_panic() {
    let mut random = Rng::with_seed(7);
    let mut reader = Reader::new();
    let mut events = Vec::new();
    for number in 0..50_000 {
        let mut bytes: Vec<u8> = (0..random.usize(0..120)).map(|_| random.u8(..)).collect();
        let part = random.choice(PARTS).unwrap();
        let at = random.usize(0..=bytes.len());
        bytes.splice(at..at, part.bytes());
        let text = String::from_utf8_lossy(&bytes);
        let message = strip(&text);
        reader.line(&message.text, number, message.time, &mut events);
        bounded(&mut events);
    }
    reader.finish(&mut events);
}

/// No event has grown with the log.
fn bounded(events: &mut Vec<LogEvent>) {
    for event in events.drain(..) {
        let size = match event {
            LogEvent::Fault(fault) => {
                fault.lines.len() + fault.fields.len() + fault.flags.len() + fault.text.len()
            }
            LogEvent::Dump(dump) => dump.lines.len() + dump.entries.len(),
            LogEvent::Overflow(note) | LogEvent::Undecoded(note) => note.text.len(),
            LogEvent::Suppressed(suppressed) => suppressed.function.len(),
        };
        assert!(size <= 600, "{size}");
    }
}
