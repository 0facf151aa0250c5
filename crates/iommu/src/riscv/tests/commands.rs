//! Commands, as the model decodes and runs them.

use std::format;

use iopt::{Cell, TableMemory};

use super::model::{CQCSR, CQH, CQT, GLOBAL, Model, ON, PPN, Range, Received, Space, State, bit};

fn covers((address, mask): Range, page: u64) -> bool {
    (address >> 12 ^ page).checked_shr(mask).unwrap_or(0) == 0
}

/// A range as a number of pages with its size in it, if `sized`.
fn range(pages: u64, sized: bool) -> Range {
    let mask = if sized { pages.trailing_ones() + 1 } else { 0 };
    (pages >> mask << mask << 12, mask)
}

impl Model {
    /// The decoded command; `None` when it is illegal.
    fn decode(state: &State, [first, second]: [u64; 2]) -> Option<Received> {
        let (did, pid) = (first >> 40, first >> 12 & 0xf_ffff);
        let received = match first & 0x3ff {
            operation @ (0x001 | 0x081) => {
                let (address, process, guest) = (bit(first, 10), bit(first, 32), bit(first, 33));
                let (upper, sized) = (bit(first, 34), bit(second, 9));
                let reserved = first & 0xf000_07f8_0000_0800 | second & 0xc000_0000_0000_01ff;
                if reserved != 0
                    || upper && !bit(state.capabilities, 42)
                    || sized && !bit(state.capabilities, 43)
                {
                    return None;
                }
                let pages = address.then(|| (range(second >> 10 & ((1 << 52) - 1), sized), upper));
                let id = first >> 44 & 0xffff;
                match (operation, process, guest) {
                    (0x001, true, false) => Received::Table(Space::Pscid(pid), pages),
                    (0x001, false, _) if !address => Received::First(guest.then_some(id)),
                    (0x081, false, true) => Received::Table(Space::Gscid(id), pages),
                    (0x081, false, false) if !address => Received::Second,
                    _ => return None,
                }
            }
            0x002 if first & 0xffff_c800 == 0 && second >> 62 == 0 => {
                // AV with PR and PW.
                match first >> 10 & 0xf {
                    0 if second == 0 && first >> 32 == 0 => Received::Fence,
                    0b1101 => Received::Wait,
                    _ => return None,
                }
            }
            0x003 if first & 0xfd_ffff_fc00 == 0 && second == 0 => {
                Received::Device(bit(first, 33).then_some(did))
            }
            0x083 if first & 0xfd_0000_0c00 == 0 && second == 0 && bit(first, 33) => {
                Received::Process(did, pid)
            }
            0x004 if first & 0xfc_0000_0c00 == 0 && second & 0x7ff == 0 => {
                if !bit(state.capabilities, 25) {
                    return None;
                }
                let process = bit(first, 32).then_some(pid);
                let range = range(second >> 12, bit(second, 11));
                Received::Tlb(did, bit(first, 33), process, range)
            }
            _ => return None,
        };
        Some(received)
    }

    fn run(&self, state: &mut State, received: Received) {
        match received {
            Received::Device(None) => {
                state.contexts.clear();
                state.processes.clear();
            }
            Received::Device(Some(device)) => {
                state.contexts.remove(&device);
                state.processes.retain(|(of, _), _| *of != device);
            }
            Received::Process(device, process) => {
                state.processes.remove(&(device, process));
            }
            Received::Table(space, pages) => state.translations.retain(|(of, page), leaf| {
                // Table "IOTINVAL.VMA operands and operations": with PSCV, "except for entries containing
                // global mappings". The second stage has none.
                let spared = matches!(space, Space::Pscid(_)) && bit(*leaf, GLOBAL);
                spared || *of != space || pages.is_some_and(|(range, _)| !covers(range, *page))
            }),
            Received::First(None) => {
                let keep = |of: &Space| matches!(of, Space::Gscid(_));
                state.translations.retain(|(of, _), _| keep(of));
            }
            Received::Second => {
                let keep = |of: &Space| matches!(of, Space::Pscid(_));
                state.translations.retain(|(of, _), _| keep(of));
            }
            Received::Tlb(device, _, process, range) => {
                let process = process.unwrap_or(u64::MAX);
                let named =
                    |of: &(u64, u64, u64)| of.0 == device && of.1 == process && covers(range, of.2);
                state.tlbs.retain(|of| !named(of));
                // An answer is taken through a valid context.
                let context = self.context(state, device);
                let taken = context.is_some_and(|[control, ..]| bit(control, 1));
                state.unanswered |= !taken;
            }
            _ => {}
        }
        for (device, process, page) in state.busy.clone() {
            self.access(state, (device, process), false, page);
        }
    }

    pub(super) fn fetch(&self, state: &mut State) {
        let place = |state: &State, at| state.places.get(&at).copied().unwrap_or(0) % 256;
        loop {
            let (head, tail) = (place(state, CQH), place(state, CQT));
            let csr = state.csrs.get(&CQCSR).copied().unwrap_or(0);
            if csr & (ON | 1) != ON | 1 || csr & 0x700 != 0 || state.broken.deaf || head == tail {
                return;
            }
            let at = ((state.bases[&24] >> 10 & PPN) << 12) + u64::from(head) * 16;
            let words = [self.read(at), self.read(at + 8)];
            let stop = state.broken.stops.filter(|stop| stop.1 == state.fetched);
            state.fetched += 1;
            let received = Self::decode(state, words);
            if received.is_none() {
                state.wrong.push(format!("command {words:x?}"));
            }
            if let (Some((bits, _)), _) | (None, (None, bits)) = (stop, (received, 1 << 10)) {
                let csr = state.csrs.entry(CQCSR).or_default();
                *csr = if bits == 0 { *csr & !ON } else { *csr | bits };
                return;
            }
            let Some(received) = received else { return };
            state.received.push(received);
            if matches!(received, Received::Fence | Received::Wait) {
                while let Some(received) = state.pending.pop() {
                    self.run(state, received);
                }
                if std::mem::take(&mut state.unanswered) {
                    *state.csrs.entry(CQCSR).or_default() |= 1 << 9;
                    return;
                }
                if received == Received::Wait && !state.broken.mute {
                    let at = words[1] << 2;
                    let cell = &self.memory.entries(at & !7, 1)[0];
                    assert_eq!(at & 4, 0);
                    cell.set_release(cell.get() >> 32 << 32 | words[0] >> 32);
                }
            } else {
                state.pending.push(received);
            }
            state.places.insert(CQH, (head + 1) % 256);
        }
    }
}
