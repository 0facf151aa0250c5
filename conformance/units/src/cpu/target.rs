//! Registers of a target, as a debugger stub describes them.
//!
//! The description is XML, of which only two kinds of elements matter: `<xi:include href="…"/>`, a file with
//! a part of it, and `<reg name="…" bitsize="…" regnum="…"/>`. A register without a number has the one behind
//! the register before it.
//!
//! Source: GDB, "Target Description Format".

use std::collections::BTreeMap;

/// A register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Register {
    /// Number in requests.
    pub(super) number: u64,
    /// Its bytes.
    pub(super) bytes: usize,
}

/// The files that a description consists of.
pub(super) fn parts(description: &str) -> Vec<String> {
    let included = elements(description, "xi:include");
    included
        .filter_map(|element| attribute(&element, "href"))
        .collect()
}

/// The registers that are numbers of at most 64 bits, in files in the order in which they are included.
/// Where a name comes twice, the first counts.
pub(super) fn registers(files: &[String]) -> BTreeMap<String, Register> {
    let mut registers = BTreeMap::new();
    let mut number = 0;
    for element in files.iter().flat_map(|file| elements(file, "reg")) {
        let say = |name| attribute(&element, name);
        let is = |name| say(name).and_then(|text| text.parse::<u64>().ok());
        number = is("regnum").unwrap_or(number);
        if let (Some(name), Some(bits @ 8..=64)) = (say("name"), is("bitsize")) {
            let bytes = bits as usize / 8;
            let register = Register { number, bytes };
            registers.entry(name).or_insert(register);
        }
        number += 1;
    }
    registers
}

/// The number that the bytes of a register are, the lowest first.
pub(super) fn value(bytes: &[u8]) -> u64 {
    let byte = |value, byte: &u8| value << 8 | u64::from(*byte);
    bytes.iter().rev().fold(0, byte)
}

/// Text between `<name ` and `>`, outside of comments.
fn elements<'t>(text: &'t str, name: &'t str) -> impl Iterator<Item = String> + 't {
    let spoken = text.split("<!--").enumerate().map(|(nth, part)| match nth {
        0 => part,
        _ => part.split_once("-->").map_or("", |(_, behind)| behind),
    });
    let elements = spoken.flat_map(|part| part.split('<').skip(1));
    elements.filter_map(move |element| {
        let inner = element.split('>').next()?.strip_prefix(name)?;
        inner
            .starts_with(char::is_whitespace)
            .then(|| inner.to_owned())
    })
}

fn attribute(element: &str, name: &str) -> Option<String> {
    let mut rest = element;
    while let Some((said, behind)) = rest.split_once("=\"") {
        let (value, behind) = behind.split_once('"')?;
        if said.trim() == name {
            return Some(value.to_owned());
        }
        rest = behind;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_have_the_numbers_of_their_order_or_their_own() {
        let whole = "<?xml version=\"1.0\"?><!DOCTYPE target SYSTEM \"gdb-target.dtd\"><target>\
                     <architecture>x</architecture><xi:include href=\"core.xml\"/>\
                     <xi:include href=\"more.xml\"/></target>";
        assert_eq!(parts(whole), ["core.xml", "more.xml"]);
        let core = "<!-- <reg name=\"gone\" bitsize=\"64\"/> --><feature name=\"core\">\n\
                    <flags id=\"f\" size=\"4\"><field name=\"reg\" start=\"0\" end=\"0\"/></flags>\n\
                    <reg name=\"a\" bitsize=\"64\" type=\"int64\" regnum=\"0\"/>\n\
                    <!--reg name=\"gone\" bitsize=\"64\"/-->\n\
                    <reg name=\"wide\" bitsize=\"128\"/><reg bitsize=\"32\" name=\"b\"/></feature>";
        let more = "<feature><reg name=\"far\" regnum=\"90\" bitsize=\"64\"/>\
                    <reg name=\"a\" bitsize=\"32\"/><reg name=\"next\" bitsize=\"8\"/></feature>";
        let found = registers(&[core.into(), more.into()]);
        let register = |number, bytes| Register { number, bytes };
        let expected = [
            ("a", register(0, 8)),
            ("b", register(2, 4)),
            ("far", register(90, 8)),
            ("next", register(92, 1)),
        ];
        let expected = expected.map(|(name, register)| (name.to_owned(), register));
        assert_eq!(found, BTreeMap::from(expected));
    }

    #[test]
    fn half_a_description_gives_what_is_there() {
        let whole = "<reg name=\"a\" bitsize=\"64\"/><reg name=\"b\" bitsize=\"64\"/>";
        for end in 0..whole.len() {
            assert!(registers(&[whole[..end].into()]).len() <= 2);
        }
    }

    #[test]
    fn the_lowest_byte_comes_first() {
        assert_eq!(value(&[0x34, 0x12, 0, 0]), 0x1234);
        assert_eq!(value(&[0; 8]), 0);
    }
}
