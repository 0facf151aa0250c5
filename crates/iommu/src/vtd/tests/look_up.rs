//! How the model looks devices up in memory, with its own reading of chapter 9.

use super::model::Model;

impl Model {
    /// Looks up a request without a PASID: domain, table, levels, and true for a first stage.
    pub(super) fn look_up(&self, source: u16) -> Option<(u16, u64, u64, bool)> {
        self.look_up_pasid(source, None)
    }

    /// The same for a request with a PASID.
    pub(super) fn look_up_pasid(
        &self,
        source: u16,
        pasid: Option<u64>,
    ) -> Option<(u16, u64, u64, bool)> {
        let root = self.state().active_root;
        let read = |address| (self.read)(address);
        let page = |word: u64| (word & 1 == 1).then_some(word & !0xfff);
        let context = self.context(source)?;
        let low = read(context);
        if root >> 10 & 3 == 0 {
            let high = read(context + 8);
            // TT (3:2): with a device TLB, or without.
            let good = low & 0xffa == 0 && high >> 24 == 0 && pasid.is_none();
            let table = page(low).filter(|_| good)?;
            return Some(((high >> 8) as u16, table, (high & 7) + 2, false));
        }
        let directory = page(low)?;
        assert_eq!(read(context + 8), 0, "RID_PASID = 0");
        assert_eq!(low & 0x1f2, 0, "nothing but DTE, PASIDE and PDTS");
        let entries = 128 << (low >> 9 & 7);
        let pasid = match pasid {
            None => 0,
            Some(pasid) if low >> 3 & 1 == 1 && pasid >> 6 < entries => pasid,
            // PASIDs are blocked, or this one is beyond the directory.
            Some(_) => return None,
        };
        let table = page(read(directory + (pasid >> 6) * 8))?;
        let entry = table + (pasid & 63) * 64;
        let low = read(entry);
        if low & 1 == 0 {
            return None;
        }
        let domain = read(entry + 8) as u16;
        match low >> 6 & 7 {
            1 => {
                let first = read(entry + 16);
                Some((domain, first & !0xfff, 4 + (first >> 2 & 3), true))
            }
            2 => Some((domain, low & !0xfff, (low >> 2 & 7) + 2, false)),
            _ => None,
        }
    }

    /// Where the context entry is, if there is a table for it.
    fn context(&self, source: u16) -> Option<u64> {
        let root = self.state().active_root;
        let page = |word: u64| (word & 1 == 1).then_some(word & !0xfff);
        let (bus, function) = (u64::from(source >> 8), u64::from(source & 0xff));
        let table = root & !0xfff;
        if root >> 10 & 3 == 0 {
            let contexts = page((self.read)(table + bus * 16))?;
            return Some(contexts + function * 16);
        }
        let contexts = page((self.read)(table + bus * 16 + (function >> 7) * 8))?;
        Some(contexts + (function & 0x7f) * 32)
    }

    /// True if translation requests of a device are answered: TT = 1, or DTE.
    pub(super) fn serves_tlb(&self, source: u16) -> bool {
        let low = self
            .context(source)
            .map_or(0, |context| (self.read)(context));
        low & 1 == 1 && low >> 2 & 1 == 1
    }
}
