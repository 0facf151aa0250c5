//! Packets of the remote serial protocol: bytes to packets and back.
//!
//! `$data#nn`, where `nn` is the sum of the bytes of the data modulo 256 in hexadecimal. In the data
//! `}` says that the next byte has its bit 5 turned over, and `*` that the byte before it comes so many
//! times more as the next one says, less 29. The receiver of a packet answers `+`, or `-` to have it again.
//!
//! Source: GDB, "Remote Serial Protocol", sections "Overview" and "Standard Replies".

/// The most bytes that data may have, spelt out.
pub(super) const LONGEST: usize = 256 << 10;

const ESCAPE: u8 = b'}';
const TURNED: u8 = 0x20;
const REPEAT: u8 = b'*';
/// A count of repetitions is a printable character: from 3 on, plus this.
const REPEAT_BASE: u8 = 29;

/// Received piece.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Piece {
    /// The packet before was understood.
    Acknowledged,
    /// The packet before is to be sent again.
    Again,
    /// A packet's data.
    Packet(Vec<u8>),
}

/// Why what came is no packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Damage {
    /// On the way something was lost or changed.
    #[error("the sum is {computed:#04x}, not {said:#04x}")]
    Sum {
        /// Sum in the packet.
        said: u8,
        /// Sum of its data.
        computed: u8,
    },
    /// The two bytes behind `#` are no number.
    #[error("no sum behind the data but {0:02x?}")]
    NoSum([u8; 2]),
    /// It begins with neither `$` nor `+` nor `-`.
    #[error("a packet cannot begin with {0:#04x}")]
    Begin(u8),
    /// `}` or `*` without what belongs to it.
    #[error("byte {0} of the data lacks what belongs to it")]
    Cut(usize),
    /// A packet that goes on and on.
    #[error("a packet of more than {LONGEST} bytes")]
    TooLong,
}

/// The packet that holds `data`.
pub(super) fn encode(data: &[u8]) -> Vec<u8> {
    let mut packet = vec![b'$'];
    for &byte in data {
        if matches!(byte, b'$' | b'#' | ESCAPE | REPEAT) {
            packet.extend([ESCAPE, byte ^ TURNED]);
        } else {
            packet.push(byte);
        }
    }
    let sum = sum(&packet[1..]);
    packet.extend(format!("#{sum:02x}").bytes());
    packet
}

/// Takes the first piece out of what was received; `None` while it is not there in full. A damaged one
/// is taken out as well.
pub(super) fn take(received: &mut Vec<u8>) -> Option<Result<Piece, Damage>> {
    let first = *received.first()?;
    let (len, piece) = match first {
        b'+' => (1, Ok(Piece::Acknowledged)),
        b'-' => (1, Ok(Piece::Again)),
        b'$' => match received.iter().position(|&byte| byte == b'#') {
            Some(end) => {
                let said = [*received.get(end + 1)?, *received.get(end + 2)?];
                (end + 3, decode(&received[1..end], said).map(Piece::Packet))
            }
            None if received.len() > LONGEST => (received.len(), Err(Damage::TooLong)),
            None => return None,
        },
        other => (1, Err(Damage::Begin(other))),
    };
    received.drain(..len);
    Some(piece)
}

/// The data between `$` and `#`, spelt out.
fn decode(packed: &[u8], said: [u8; 2]) -> Result<Vec<u8>, Damage> {
    let number = unhex(&said).ok_or(Damage::NoSum(said))?;
    let (said, computed) = (number[0], sum(packed));
    if said != computed {
        return Err(Damage::Sum { said, computed });
    }
    let mut data = Vec::with_capacity(packed.len());
    let mut bytes = packed.iter().copied().enumerate();
    while let Some((at, byte)) = bytes.next() {
        let mut next = || bytes.next().map(|(_, byte)| byte).ok_or(Damage::Cut(at));
        match byte {
            ESCAPE => data.push(next()? ^ TURNED),
            REPEAT => {
                let count = next()?.checked_sub(REPEAT_BASE).ok_or(Damage::Cut(at))?;
                let again = *data.last().ok_or(Damage::Cut(at))?;
                data.extend((0..count).map(|_| again));
            }
            byte => data.push(byte),
        }
        if data.len() > LONGEST {
            return Err(Damage::TooLong);
        }
    }
    Ok(data)
}

fn sum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
}

/// Bytes in hexadecimal.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The reverse of [`hex`].
pub(super) fn unhex(text: &[u8]) -> Option<Vec<u8>> {
    let (pairs, []) = text.as_chunks::<2>() else {
        return None;
    };
    let byte = |pair: &[u8; 2]| {
        let digits = pair.iter().all(u8::is_ascii_hexdigit);
        let text = str::from_utf8(pair).ok().filter(|_| digits)?;
        u8::from_str_radix(text, 16).ok()
    };
    pairs.iter().map(byte).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(bytes: &[u8]) -> (Vec<Result<Piece, Damage>>, Vec<u8>) {
        let mut received = bytes.to_vec();
        let taken = std::iter::from_fn(|| take(&mut received)).collect();
        (taken, received)
    }

    fn packet(data: &[u8]) -> Result<Piece, Damage> {
        Ok(Piece::Packet(data.to_vec()))
    }

    /// Both from the manual: "Overview" has the sum, "Standard Replies" the run.
    #[test]
    fn packets_are_those_of_the_manual() {
        assert_eq!(encode(b"OK"), b"$OK#9a");
        assert_eq!(encode(b""), b"$#00");
        assert_eq!(encode(b"a}#$*"), b"$a}]}\x03}\x04}\x0a#c3");
        let (taken, rest) = pieces(b"+$OK#9a$0* #7a-");
        let [acknowledged, again] = [Ok(Piece::Acknowledged), Ok(Piece::Again)];
        assert_eq!(taken, [acknowledged, packet(b"OK"), packet(b"0000"), again]);
        assert_eq!(rest, b"");
    }

    #[test]
    fn any_data_comes_back_as_it_was() {
        let all: Vec<u8> = (0..=255).collect();
        let (taken, rest) = pieces(&encode(&all));
        assert_eq!((taken, rest), (vec![packet(&all)], vec![]));
    }

    #[test]
    fn a_packet_is_waited_for_to_its_end() {
        let whole = encode(b"T05thread:01;");
        for end in 0..whole.len() {
            let (taken, rest) = pieces(&whole[..end]);
            assert_eq!((taken, rest), (vec![], whole[..end].to_vec()));
        }
    }

    #[test]
    fn damage_is_named_and_what_follows_it_is_found() {
        let mut turned = encode(b"OK");
        turned[1] ^= 4;
        for (bytes, damage) in [
            (
                &turned[..],
                Damage::Sum {
                    said: 0x9a,
                    computed: 0x96,
                },
            ),
            (b"$OK#9x", Damage::NoSum(*b"9x")),
            (b"$OK#+9", Damage::NoSum(*b"+9")),
            (b"%", Damage::Begin(b'%')),
            (b"$a}#de", Damage::Cut(1)),
            (b"$a*#8b", Damage::Cut(1)),
            (b"$* #4a", Damage::Cut(0)),
            (b"$a*\x10#9b", Damage::Cut(1)),
        ] {
            let (taken, rest) = pieces(&[bytes, &encode(b"OK")].concat());
            assert_eq!((taken, rest), (vec![Err(damage), packet(b"OK")], vec![]));
        }
    }

    #[test]
    fn no_packet_is_longer_than_memory_allows() {
        let endless = [&b"$"[..], &[b'a'; LONGEST]].concat();
        assert_eq!(pieces(&endless).0, [Err(Damage::TooLong)]);
        // Two bytes say 97.
        let runs = b"*~".repeat(LONGEST / 96);
        let data = [&b"a"[..], &runs].concat();
        let packet = [b"$", &data[..], format!("#{:02x}", sum(&data)).as_bytes()].concat();
        assert_eq!(pieces(&packet).0, [Err(Damage::TooLong)]);
    }

    #[test]
    fn hexadecimal_is_digits_in_pairs() {
        assert_eq!(hex(b"\x00\xfe"), "00fe");
        assert_eq!(unhex(b"00Fe"), Some(vec![0, 0xfe]));
        for wrong in [&b"0"[..], b"0g", b"+1", b"\xc3\xa4"] {
            assert_eq!(unhex(wrong), None);
        }
    }
}
