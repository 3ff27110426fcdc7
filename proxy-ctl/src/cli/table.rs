//! Output of the commands: tables for people, and JSON for programs.

use std::io::{self, Write as _};

use comfy_table::{ColumnConstraint, ContentArrangement, Row, Table, Width, presets};
use serde::Serialize;

/// The narrowest width of a table. Narrower ones cannot be read.
const NARROWEST: u16 = 40;

/// The number of spaces between two columns.
const GAP: u16 = 2;

/// Returns the number of columns of the terminal, from COLUMNS or from the terminal itself. `None`
/// if neither has it.
pub(super) fn width() -> Option<u16> {
    let said = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
    said.or_else(|| terminal_size::terminal_size_of(io::stdout()).map(|(columns, _)| columns.0))
}

/// Lays out a table that is as wide as the terminal. If its width is not known, no line is wrapped.
///
/// Lines break between words only, so that an address can be copied. A table whose words have no
/// room in the terminal is wider than it.
///
/// The table has no borders, so that other tools can cut out columns.
pub(super) fn table<const N: usize>(
    header: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
) -> String {
    table_of_width(header, rows, width())
}

/// Returns the length of the longest word.
fn longest_word(cell: &str) -> u16 {
    let longest = cell.split_whitespace().map(|word| word.chars().count()).max();
    longest.and_then(|longest| u16::try_from(longest).ok()).unwrap_or(0)
}

/// Returns the length of the longest word in each column.
fn longest_words<const N: usize>(header: [&str; N], rows: &[[String; N]]) -> [u16; N] {
    let mut longest = header.map(longest_word);
    for row in rows {
        for (longest, cell) in longest.iter_mut().zip(row) {
            *longest = longest_word(cell).max(*longest);
        }
    }
    longest
}

/// Returns true if a table of these rows fits the terminal without a break within a word.
pub(super) fn fits<const N: usize>(header: [&str; N], rows: &[[String; N]]) -> bool {
    let words: u32 =
        longest_words(header, rows).into_iter().map(|word| u32::from(word) + u32::from(GAP)).sum();
    width().is_none_or(|width| words <= u32::from(width.max(NARROWEST)) + u32::from(GAP))
}

fn table_of_width<const N: usize>(
    header: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
    width: Option<u16>,
) -> String {
    let rows: Vec<_> = rows.into_iter().collect();
    let words = longest_words(header, &rows);
    let mut table = Table::new();
    table
        .load_style(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Disabled)
        .set_header(header)
        .add_rows(rows.into_iter().map(Row::from));
    if let Some(width) = width {
        let least: u32 = words.iter().map(|word| u32::from(*word) + u32::from(GAP)).sum();
        let width = u32::from(width.max(NARROWEST)).max(least);
        let width = u16::try_from(width).unwrap_or(u16::MAX);
        table.set_content_arrangement(ContentArrangement::Dynamic).set_width(width);
    }
    for (column, word) in table.column_iter_mut().zip(words) {
        column.set_padding((0, GAP));
        column.set_constraint(ColumnConstraint::LowerBoundary(Width::Fixed(word.saturating_add(GAP))));
    }
    let lines: Vec<String> = table.lines().map(|line| line.trim_end().to_owned()).collect();
    lines.join("\n") + "\n"
}

/// Prints a text. A reader that has gone away is no error.
pub(super) fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        done => done,
    }
}

pub(super) fn print_json(value: &impl Serialize) -> anyhow::Result<()> {
    Ok(print(&(serde_json::to_string_pretty(value)? + "\n"))?)
}

/// Returns a size as text, such as `4.0 MiB`.
pub(super) fn bytes(bytes: u64) -> String {
    let mut value = bytes as f64;
    let mut unit = "B";
    for larger in ["KiB", "MiB", "GiB"] {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = larger;
    }
    if unit == "B" { format!("{bytes} B") } else { format!("{value:.1} {unit}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_fit_their_width() {
        let row =
            ["kube-system/kube-dns:dns-tcp".to_owned(), "10.96.0.10:53, [fd00:10:96::a]:53, ".repeat(5)];
        for width in [80, 120] {
            let text = table_of_width(["NAME", "FRONTENDS"], [row.clone()], Some(width));
            assert!(text.lines().all(|line| line.chars().count() <= usize::from(width)), "{text}");
            assert!(text.starts_with("NAME"), "{text}");
        }
    }

    #[test]
    fn no_word_is_broken() {
        let addresses = ["10.244.1.7:40000", "[fd00:10:244:1::7]:40000", "10.96.0.1:80", "10.244.2.3:8080"];
        let row = ["default/web-with-a-long-name:http", "TCP", addresses[0], addresses[1]].map(str::to_owned);
        for width in [40, 60, 80, 100] {
            let text =
                table_of_width(["SERVICE", "PROTOCOL", "CLIENT", "FRONTEND"], [row.clone()], Some(width));
            for word in &row {
                assert!(text.contains(word.as_str()), "{width}: {text}");
            }
        }
    }

    #[test]
    fn for_another_program_no_line_is_wrapped() {
        let row = ["a".repeat(150), "b".repeat(150)];
        let text = table_of_width(["NAME", "FRONTENDS"], [row.clone()], None);
        assert_eq!(text.lines().nth(1), Some(format!("{}  {}", row[0], row[1]).as_str()), "{text}");
    }

    #[test]
    fn sizes() {
        assert_eq!(bytes(512), "512 B");
        assert_eq!(bytes(4 * 1024 * 1024), "4.0 MiB");
    }
}
