package kubectl

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"
	"unicode/utf8"

	"golang.org/x/term"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"sigs.k8s.io/yaml"
)

// structured reports whether a format is for programs.
func structured(format string) bool { return format == formatJSON || format == formatYAML }

// writeValue writes a value as JSON or YAML.
func writeValue(to io.Writer, format string, value any) error {
	var data bytes.Buffer
	encoder := json.NewEncoder(&data)
	encoder.SetEscapeHTML(false) // remedies have placeholders such as <hub>
	encoder.SetIndent("", "  ")
	if err := encoder.Encode(value); err != nil {
		return err
	}
	return writeJSON(to, format, data.Bytes())
}

// writeMessage writes a message of the agent's API as JSON or YAML, with the names of the API's
// fields in camelCase, as grpcurl does.
func writeMessage(to io.Writer, format string, message proto.Message) error {
	data, err := protojson.Marshal(message)
	if err != nil {
		return err
	}
	var value any // protojson varies its white space on purpose
	if err := json.Unmarshal(data, &value); err != nil {
		return err
	}
	return writeValue(to, format, value)
}

func writeJSON(to io.Writer, format string, data []byte) error {
	if format == formatYAML {
		var err error
		if data, err = yaml.JSONToYAML(data); err != nil {
			return err
		}
	}
	_, err := to.Write(data)
	return err
}

// table writes rows in columns. The first row is the header.
func table(to io.Writer, rows [][]string) error {
	tabs := tabwriter.NewWriter(to, 0, 0, 2, ' ', 0)
	for _, row := range rows {
		for i := range row {
			if row[i] == "" {
				row[i] = "-"
			}
		}
		fmt.Fprintln(tabs, strings.TrimRight(strings.Join(row, "\t"), "\t"))
	}
	return tabs.Flush()
}

// columns returns the width of the terminal, or 0 if the output is not one.
func columns(to io.Writer) int {
	width, _ := size(to)
	return width
}

// size returns the width and height of the terminal, or zeros if the output is not one.
func size(to io.Writer) (width, height int) {
	file, ok := to.(*os.File)
	if !ok {
		return 0, 0
	}
	width, height, err := term.GetSize(int(file.Fd()))
	if err != nil {
		return 0, 0
	}
	return width, height
}

// wrap breaks a text into lines of at most width characters, at spaces. Words that are longer are
// not broken. A width of 0 or less breaks nothing.
func wrap(text string, width int) []string {
	if width <= 0 {
		return []string{text}
	}
	var lines []string
	line := ""
	for word := range strings.FieldsSeq(text) {
		switch {
		case line == "":
			line = word
		case utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) > width:
			lines, line = append(lines, line), word
		default:
			line += " " + word
		}
	}
	return append(lines, line)
}

// cut shortens a line to a number of characters, so that a terminal does not wrap it.
func cut(line string, width int) string {
	if width <= 0 || utf8.RuneCountInString(line) <= width {
		return line
	}
	runes := []rune(line)
	return string(runes[:max(width-1, 0)]) + "…"
}

// oneLine replaces control characters: messages of others must not control a terminal.
func oneLine(text string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r >= 0x80 && r < 0xa0 {
			return ' '
		}
		return r
	}, text)
}
