//! A [`Handover`] as bytes, or as hexadecimal digits in a line of text, for the other process.
//!
//! Words of 8 bytes, little-endian: a magic number, what is there once, and each list after its length. Bytes
//! come from another process: what is no handover is refused by name and offset, and lists are as long as
//! the bytes have room for. Whether areas and tables fit together is for [`Ioas::adopt`](crate::Ioas::adopt).

use alloc::vec::Vec;
use core::fmt;
use core::str::FromStr;

use iommu::{DeviceId, DomainId};
use iopt::{FormatId, Interruption, Prot, Root};
use runs::{Iova, PageSizes, Span};

use super::handover::{HandedArea, HandedDomain, Handover};
use crate::space::dirty::Tracking;

/// "dmsHO", and the version.
const MAGIC: u64 = u64::from_le_bytes(*b"dmsHO\0\0\x01");
const WORD: usize = 8;

/// Flaw in bytes that should be a [`Handover`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// They do not begin as one of this version.
    #[error("it does not begin as a handover of this version")]
    Magic,
    /// They end too early.
    #[error("it ends at byte {at:#x}, before {what}")]
    Ends {
        /// Offset of the missing item.
        at: usize,
        /// Missing item.
        what: &'static str,
    },
    /// A word has a value that it cannot have.
    #[error("at byte {at:#x}, {value:#x} is no {what}")]
    Value {
        /// Offset of the word.
        at: usize,
        /// Expected item.
        what: &'static str,
        /// Value that was read.
        value: u64,
    },
    /// Text that is not pairs of hexadecimal digits.
    #[error("it is not made of pairs of hexadecimal digits")]
    Digits,
    /// There is more behind the end.
    #[error("its end at byte {at:#x} is followed by more")]
    Longer {
        /// The end.
        at: usize,
    },
}

impl Handover {
    /// It as bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer(Vec::new());
        out.word(MAGIC);
        out.word(self.kept.into());
        match self.tracking {
            None => out.word(0),
            Some(Tracking { leaf, interruption }) => {
                out.word(match interruption {
                    Interruption::Refused => 1,
                    Interruption::Allowed => 2,
                });
                out.word(leaf.unwrap_or(0));
            }
        }
        out.word(self.domains.len() as u64);
        for domain in &self.domains {
            out.word(domain.id.0.into());
            out.0.extend(domain.root.format.to_bytes());
            out.word(domain.root.address);
            out.word(domain.root.levels.into());
            out.word(domain.page_sizes.bits());
            out.word(domain.coherent.map_or(2, u64::from));
            out.word(domain.devices.len() as u64);
            domain
                .devices
                .iter()
                .for_each(|device| out.word(device.0.into()));
        }
        out.word(self.areas.len() as u64);
        for area in &self.areas {
            out.span(area.range);
            out.word(area.memory as u64);
            out.word(area.offset);
            out.word(area.prot.bits().into());
            let [low, high] = area.cut;
            let flags = [area.out, area.released, low, high];
            let flag = |(bit, on): (usize, &bool)| u64::from(*on) << bit;
            out.word(flags.iter().enumerate().map(flag).sum());
        }
        for spans in [&self.allowed, &self.written] {
            out.word(spans.len() as u64);
            spans.iter().for_each(|span| out.span(*span));
        }
        out.0
    }

    /// Reads the output of [`encode`](Self::encode).
    ///
    /// # Errors
    ///
    /// See [`DecodeError`].
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut from = Reader { bytes, at: 0 };
        if from.word("a magic number")? != MAGIC {
            return Err(DecodeError::Magic);
        }
        let kept = from.below(2, "truth value")? == 1;
        let interruption = match from.below(3, "way of tracking")? {
            0 => None,
            1 => Some(Interruption::Refused),
            _ => Some(Interruption::Allowed),
        };
        let tracking = match interruption {
            None => None,
            Some(interruption) => {
                let leaf = from.word("the size of leaves")?;
                let leaf = (leaf > 0).then_some(leaf);
                Some(Tracking { leaf, interruption })
            }
        };
        let domains = from.list(7, |from| {
            Ok(HandedDomain {
                id: DomainId(from.number("number of a domain")?),
                root: Root {
                    format: from.format()?,
                    address: from.word("the address of a table")?,
                    levels: from.number("number of levels")?,
                },
                page_sizes: PageSizes::from_bits(from.word("page sizes")?),
                coherent: match from.below(3, "kind of coherence")? {
                    2 => None,
                    coherent => Some(coherent == 1),
                },
                devices: from.list(1, |from| Ok(DeviceId(from.number("device")?)))?,
            })
        })?;
        let areas = from.list(6, |from| {
            let range = from.span()?;
            let memory = from.number("number of a memory")?;
            let offset = from.word("an offset")?;
            let at = from.at;
            let value = from.word("permissions")?;
            let prot = u32::try_from(value).ok().and_then(Prot::from_bits);
            let what = "set of permissions";
            let prot = prot.ok_or(DecodeError::Value { at, what, value })?;
            let flags = from.below(16, "set of flags")?;
            let flag = |bit: u32| flags >> bit & 1 != 0;
            Ok(HandedArea {
                range,
                memory,
                offset,
                prot,
                out: flag(0),
                released: flag(1),
                cut: [flag(2), flag(3)],
            })
        })?;
        let allowed = from.list(2, Reader::span)?;
        let written = from.list(2, Reader::span)?;
        if from.at < bytes.len() {
            return Err(DecodeError::Longer { at: from.at });
        }
        Ok(Self {
            domains,
            kept,
            areas,
            allowed,
            written,
            tracking,
        })
    }
}

/// [`encode`](Handover::encode) in hexadecimal digits.
impl fmt::Display for Handover {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.encode();
        bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl FromStr for Handover {
    type Err = DecodeError;

    fn from_str(text: &str) -> Result<Self, DecodeError> {
        let digit = |digit: &u8| char::from(*digit).to_digit(16);
        let pairs = text.as_bytes().chunks_exact(2);
        let rest = pairs.remainder();
        let byte = |pair: &[u8]| match pair {
            [high, low] => Some((digit(high)? << 4 | digit(low)?) as u8),
            _ => None,
        };
        let bytes: Option<Vec<u8>> = pairs.map(byte).collect();
        match bytes.filter(|_| rest.is_empty()) {
            Some(bytes) => Self::decode(&bytes),
            None => Err(DecodeError::Digits),
        }
    }
}

struct Writer(Vec<u8>);

impl Writer {
    fn word(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }

    fn span(&mut self, span: Span<Iova>) {
        self.word(span.start);
        self.word(span.len);
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    fn word(&mut self, what: &'static str) -> Result<u64, DecodeError> {
        let at = self.at;
        let rest = self.bytes.get(at..).unwrap_or_default();
        let word = rest.first_chunk().ok_or(DecodeError::Ends { at, what })?;
        self.at += WORD;
        Ok(u64::from_le_bytes(*word))
    }

    fn number<T: TryFrom<u64>>(&mut self, what: &'static str) -> Result<T, DecodeError> {
        let at = self.at;
        let value = self.word(what)?;
        T::try_from(value).map_err(|_| DecodeError::Value { at, what, value })
    }

    fn below(&mut self, end: u64, what: &'static str) -> Result<u64, DecodeError> {
        let at = self.at;
        let value = self.word(what)?;
        if value < end {
            Ok(value)
        } else {
            Err(DecodeError::Value { at, what, value })
        }
    }

    fn format(&mut self) -> Result<FormatId, DecodeError> {
        let at = self.at;
        let what = "format";
        let value = self.word(what)?;
        FormatId::from_bytes(value.to_le_bytes()).ok_or(DecodeError::Value { at, what, value })
    }

    fn span(&mut self) -> Result<Span<Iova>, DecodeError> {
        let start = self.word("the start of a range")?;
        let len = self.word("the length of a range")?;
        Ok(Span::new(start, len))
    }

    /// A list whose entries have at least `words` words each: a length that there is no room for reserves
    /// nothing.
    fn list<T>(
        &mut self,
        words: usize,
        mut entry: impl FnMut(&mut Self) -> Result<T, DecodeError>,
    ) -> Result<Vec<T>, DecodeError> {
        let room = (self.bytes.len().saturating_sub(self.at + WORD)) / (words * WORD);
        let count = self.below(room as u64 + 1, "length of a list that is here")?;
        let mut list = Vec::with_capacity(count as usize);
        for _ in 0..count {
            list.push(entry(self)?);
        }
        Ok(list)
    }
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;
    use alloc::vec;

    use iopt::format::{DartConfig, DartVersion};
    use proptest::prelude::*;

    use super::*;

    fn spans() -> impl Strategy<Value = Vec<Span<Iova>>> {
        prop::collection::vec(any::<(u64, u64)>(), 0..4).prop_map(|spans| {
            spans
                .into_iter()
                .map(|(start, len)| Span::new(start, len))
                .collect()
        })
    }

    fn domains() -> impl Strategy<Value = Vec<HandedDomain>> {
        let dart = FormatId::Dart(DartConfig {
            version: DartVersion::V1,
            page_log2: 14,
            input_bits: 36,
        });
        let format = prop::sample::select(vec![FormatId::VtdSs, FormatId::RiscVG, dart]);
        let devices = prop::collection::vec(any::<u32>().prop_map(DeviceId), 0..4);
        let one = (any::<(u32, u64, u8, u64, Option<bool>)>(), format, devices);
        let one = one.prop_map(
            |((id, address, levels, sizes, coherent), format, devices)| HandedDomain {
                id: DomainId(id),
                root: Root {
                    format,
                    address,
                    levels,
                },
                page_sizes: PageSizes::from_bits(sizes),
                coherent,
                devices,
            },
        );
        prop::collection::vec(one, 0..3)
    }

    fn areas() -> impl Strategy<Value = Vec<HandedArea>> {
        let one = any::<((u64, u64), usize, u64, u32, (bool, bool), [bool; 2])>().prop_map(
            |((start, len), memory, offset, prot, (out, released), cut)| HandedArea {
                range: Span::new(start, len),
                memory,
                offset,
                prot: Prot::from_bits_truncate(prot),
                out,
                released,
                cut,
            },
        );
        prop::collection::vec(one, 0..4)
    }

    fn tracking() -> impl Strategy<Value = Option<Tracking>> {
        prop::option::of(
            (any::<bool>(), prop::option::of(1u64..)).prop_map(|(allowed, leaf)| {
                let interruption = match allowed {
                    true => Interruption::Allowed,
                    false => Interruption::Refused,
                };
                Tracking { leaf, interruption }
            }),
        )
    }

    proptest! {
        #[test]
        fn what_was_written_is_read_and_nothing_shorter_or_longer(
            (domains, areas, allowed) in (domains(), areas(), spans()),
            (written, tracking, kept) in (spans(), tracking(), any::<bool>()),
        ) {
            let handover = Handover { domains, kept, areas, allowed, written, tracking };
            let mut bytes = handover.encode();
            let read = Handover::decode(&bytes);
            prop_assert_eq!(read.as_ref(), Ok(&handover));
            prop_assert_eq!(handover.to_string().parse(), Ok(handover));
            for end in 0..bytes.len() {
                prop_assert!(Handover::decode(&bytes[..end]).is_err(), "{} bytes", end);
            }
            let at = bytes.len();
            bytes.push(0);
            prop_assert_eq!(Handover::decode(&bytes), Err(DecodeError::Longer { at }));
        }

        /// Every value of a word is read or refused; a value that is read is written as it was.
        #[test]
        fn any_word_may_be_another(domains in domains(), areas in areas(), place: usize, word: u64) {
            let handover = Handover { domains, areas, ..Handover::default() };
            let mut bytes = handover.encode();
            let at = place % (bytes.len() / WORD) * WORD;
            bytes[at..at + WORD].copy_from_slice(&word.to_le_bytes());
            if let Ok(read) = Handover::decode(&bytes) {
                prop_assert_eq!(read.encode(), bytes);
            }
        }
    }

    #[test]
    fn text_that_is_no_digits_is_refused() {
        for text in ["0", "0g", "+1", "a-", "\u{e4}"] {
            assert_eq!(text.parse::<Handover>(), Err(DecodeError::Digits), "{text}");
        }
        assert!(matches!(
            "".parse::<Handover>(),
            Err(DecodeError::Ends { .. })
        ));
    }

    #[test]
    fn a_list_without_room_is_refused_where_it_is() {
        let mut bytes = Handover::default().encode();
        bytes[24..32].copy_from_slice(&u64::MAX.to_le_bytes());
        let refused = DecodeError::Value {
            at: 24,
            what: "length of a list that is here",
            value: u64::MAX,
        };
        assert_eq!(Handover::decode(&bytes), Err(refused));
    }
}
