package conformance

import (
	"encoding/json"
	"encoding/xml"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode"
)

// Outcome is the outcome of a check.
type Outcome string

// Outcomes.
const (
	Passed  Outcome = "passed"
	Failed  Outcome = "failed"
	Skipped Outcome = "skipped"
)

// Result is the result of checking one behaviour.
type Result struct {
	// ID, Area, Behaviour and Profile are those of the behaviour.
	ID        string  `json:"id"`
	Area      string  `json:"area"`
	Behaviour string  `json:"behaviour"`
	Profile   Profile `json:"profile"`
	Outcome   Outcome `json:"outcome"`
	// Message is why the check failed or was skipped.
	Message string  `json:"message,omitempty"`
	Seconds float64 `json:"seconds"`
}

// Verdict is the result of all checks.
type Verdict struct {
	Results []Result
	Began   time.Time
	Seconds float64
}

// Count returns the number of results with the outcome.
func (v Verdict) Count(o Outcome) int {
	n := 0
	for _, result := range v.Results {
		if result.Outcome == o {
			n++
		}
	}
	return n
}

// Pass reports whether the target conforms: at least one check passed, and none failed.
func (v Verdict) Pass() bool { return v.Count(Failed) == 0 && v.Count(Passed) > 0 }

// Line returns the verdict as a line: `conformance: PASS passed=… failed=… skipped=…`.
func (v Verdict) Line() string {
	return fmt.Sprintf("conformance: %s passed=%d failed=%d skipped=%d", v.word(), v.Count(Passed), v.Count(Failed), v.Count(Skipped))
}

func (v Verdict) word() string {
	if v.Pass() {
		return "PASS"
	}
	return "FAIL"
}

// WriteJSON writes the verdict as one JSON object.
func (v Verdict) WriteJSON(w io.Writer) error {
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	return encoder.Encode(struct {
		Verdict string    `json:"verdict"`
		Passed  int       `json:"passed"`
		Failed  int       `json:"failed"`
		Skipped int       `json:"skipped"`
		Began   time.Time `json:"began"`
		Seconds float64   `json:"seconds"`
		Results []Result  `json:"results"`
	}{v.word(), v.Count(Passed), v.Count(Failed), v.Count(Skipped), v.Began, v.Seconds, v.Results})
}

type junitSuite struct {
	XMLName   xml.Name    `xml:"testsuite"`
	Name      string      `xml:"name,attr"`
	Tests     int         `xml:"tests,attr"`
	Failures  int         `xml:"failures,attr"`
	Skipped   int         `xml:"skipped,attr"`
	Time      string      `xml:"time,attr"`
	Timestamp string      `xml:"timestamp,attr"`
	Cases     []junitCase `xml:"testcase"`
}

type junitCase struct {
	Class   string        `xml:"classname,attr"`
	Name    string        `xml:"name,attr"`
	Time    string        `xml:"time,attr"`
	Failure *junitMessage `xml:"failure,omitempty"`
	Skipped *junitMessage `xml:"skipped,omitempty"`
}

type junitMessage struct {
	Message string `xml:"message,attr"`
	Text    string `xml:",chardata"`
}

// WriteJUnit writes the verdict as a JUnit test suite. Each behaviour is a test case, with its area
// as the class and its ID as the name.
func (v Verdict) WriteJUnit(w io.Writer) error {
	suite := junitSuite{
		Name: "conformance", Tests: len(v.Results), Failures: v.Count(Failed), Skipped: v.Count(Skipped),
		Time: seconds(v.Seconds), Timestamp: v.Began.UTC().Format("2006-01-02T15:04:05"),
	}
	for _, result := range v.Results {
		c := junitCase{Class: result.Area, Name: result.ID, Time: seconds(result.Seconds)}
		switch result.Outcome {
		case Failed:
			c.Failure = &junitMessage{Message: result.Behaviour, Text: printable(result.Message)}
		case Skipped:
			c.Skipped = &junitMessage{Message: printable(result.Message)}
		default:
		}
		suite.Cases = append(suite.Cases, c)
	}
	if _, err := io.WriteString(w, xml.Header); err != nil {
		return err
	}
	encoder := xml.NewEncoder(w)
	encoder.Indent("", "  ")
	if err := encoder.Encode(suite); err != nil {
		return err
	}
	_, err := io.WriteString(w, "\n")
	return err
}

func seconds(s float64) string { return fmt.Sprintf("%.3f", s) }

// printable removes characters that XML does not allow: messages quote what the target sent.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) && r != '\n' && r != '\t' {
			return -1
		}
		return r
	}, strings.ToValidUTF8(text, "\uFFFD"))
}
