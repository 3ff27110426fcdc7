//! The output of iptables-save, line by line.

use std::hash::{Hash as _, Hasher as _};

use rustc_hash::FxHasher;

/// A line of the output of iptables-save.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum SavedLine<'a> {
    /// The table that the following lines belong to.
    Table(&'a str),
    /// A chain. `policy` is `-` if it is not a built-in chain.
    Chain { name: &'a str, policy: &'a str },
    /// A rule. `rule` begins after `-A` and the chain.
    Rule { chain: &'a str, rule: &'a str },
    /// COMMIT, a comment, or an unknown line.
    Other,
}

impl<'a> SavedLine<'a> {
    pub fn parse(line: &'a str) -> Self {
        if let Some(table) = line.strip_prefix('*') {
            Self::Table(table)
        } else if let Some(chain) = line.strip_prefix(':') {
            let mut words = chain.split(' ');
            Self::Chain { name: words.next().unwrap_or_default(), policy: words.next().unwrap_or_default() }
        } else if let Some(rule) = line.strip_prefix("-A ") {
            let (chain, rule) = rule.split_once(' ').unwrap_or((rule, ""));
            Self::Rule { chain, rule }
        } else {
            Self::Other
        }
    }
}

/// Returns the words of a rule, each with true if it was quoted. Within quotes, a backslash escapes
/// the next character.
pub fn words(text: &str) -> Vec<(String, bool)> {
    let (mut words, mut word) = (Vec::new(), (String::new(), false));
    let (mut in_quotes, mut characters) = (false, text.chars());
    while let Some(character) = characters.next() {
        match character {
            '"' => {
                in_quotes = !in_quotes;
                word.1 = true;
            }
            '\\' if in_quotes => word.0.extend(characters.next()),
            ' ' if !in_quotes => words.push(std::mem::take(&mut word)),
            _ => word.0.push(character),
        }
    }
    words.push(word);
    words.retain(|(word, quoted)| *quoted || !word.is_empty());
    words
}

/// Returns the word that follows the first of these flags.
pub fn after(words: &[(String, bool)], flags: &[&str]) -> Option<String> {
    let at = words.iter().position(|(word, quoted)| !quoted && flags.contains(&word.as_str()))?;
    words.get(at + 1).map(|(word, _)| word.clone())
}

/// Returns a number by which rules are compared. It does not depend on the order of the matches, in
/// which the backends differ.
pub fn digest(rule: &str) -> u64 {
    let (mut sum, mut group, mut rest) = (0_u64, FxHasher::default(), rule);
    let mut after_not = false;
    while let Some((word, left)) = split_word(rest) {
        rest = left;
        let begins = matches!(word, "!" | "-s" | "-d" | "-i" | "-o" | "-p" | "-m" | "-j" | "-g");
        if begins && !after_not {
            sum = sum.wrapping_add(group.finish());
            group = FxHasher::default();
        }
        after_not = word == "!";
        word.hash(&mut group);
    }
    sum.wrapping_add(group.finish())
}

/// Returns the first word, with its quotes, and what follows it.
fn split_word(text: &str) -> Option<(&str, &str)> {
    let text = text.trim_start_matches(' ');
    let (mut in_quotes, mut escaped) = (false, false);
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_quotes => escaped = true,
            b'"' => in_quotes = !in_quotes,
            b' ' if !in_quotes => return Some((&text[..at], &text[at..])),
            _ => {}
        }
    }
    (!text.is_empty()).then_some((text, ""))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("*nat", SavedLine::Table("nat"))]
    #[case(":INPUT ACCEPT [10:600]", SavedLine::Chain { name: "INPUT", policy: "ACCEPT" })]
    #[case(":KUBE-SERVICES - [0:0]", SavedLine::Chain { name: "KUBE-SERVICES", policy: "-" })]
    #[case("-A INPUT -p tcp -j DROP", SavedLine::Rule { chain: "INPUT", rule: "-p tcp -j DROP" })]
    #[case("-A EMPTY", SavedLine::Rule { chain: "EMPTY", rule: "" })]
    #[case("# Completed", SavedLine::Other)]
    #[case("COMMIT", SavedLine::Other)]
    fn lines(#[case] line: &str, #[case] parsed: SavedLine<'_>) {
        assert_eq!(SavedLine::parse(line), parsed);
    }

    const RULE: &str = r#"-d 10.0.0.1/32 -p tcp -m comment --comment "a -m \" b" -m tcp --dport 80 -j X"#;

    #[rstest]
    #[case::order_of_matches(
        r#"-d 10.0.0.1/32 -p tcp -m tcp --dport 80 -m comment --comment "a -m \" b" -j X"#,
        true
    )]
    #[case::blanks(
        r#"-d 10.0.0.1/32 -p tcp  -m comment --comment "a -m \" b" -m tcp --dport  80 -j X"#,
        true
    )]
    #[case::port(r#"-d 10.0.0.1/32 -p tcp -m comment --comment "a -m \" b" -m tcp --dport 81 -j X"#, false)]
    #[case::not(r#"! -d 10.0.0.1/32 -p tcp -m comment --comment "a -m \" b" -m tcp --dport 80 -j X"#, false)]
    #[case::comment(
        r#"-d 10.0.0.1/32 -p tcp -m comment --comment "a -m \" c" -m tcp --dport 80 -j X"#,
        false
    )]
    #[case::target(r#"-d 10.0.0.1/32 -p tcp -m comment --comment "a -m \" b" -m tcp --dport 80 -j Y"#, false)]
    fn rules_that_are_the_same(#[case] rule: &str, #[case] same: bool) {
        assert_eq!(digest(rule) == digest(RULE), same);
    }

    #[test]
    fn what_is_negated_is_not_the_same_as_what_is_not() {
        assert_ne!(digest("! -s 10.0.0.0/8 -d 10.0.0.1/32"), digest("-s 10.0.0.0/8 ! -d 10.0.0.1/32"));
    }
}
