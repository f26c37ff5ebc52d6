package hub

import (
	"bufio"
	"bytes"
	"io"
	"net/http"
	"slices"
	"strings"
)

// withoutManagedFields are the resources of which the agent reads no managed fields.
var withoutManagedFields = []string{"machines", "machinesets", "machineclaims"}

// Lean is a transport that leaves the managed fields out of what the API server answers, for the kinds of which there are many. They are nearly
// half of a Machine, and the decoders look at each byte several times: most of the agent's work when it starts.
func Lean(next http.RoundTripper) http.RoundTripper { return lean{next} }

type lean struct{ next http.RoundTripper }

// RoundTrip sends the request.
func (l lean) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := l.next.RoundTrip(request)
	if err != nil || request.Method != http.MethodGet || !isLean(request.URL.Path) ||
		response.StatusCode != http.StatusOK || !strings.HasPrefix(response.Header.Get("Content-Type"), "application/json") {
		return response, err
	}
	response.Body = &leanBody{Closer: response.Body, from: bufio.NewReaderSize(response.Body, leanBuffer)}
	response.ContentLength = -1
	response.Header.Del("Content-Length")
	return response, nil
}

// isLean reports whether a path is that of an object, or of a list, of one of the resources.
func isLean(path string) bool {
	resource, _ := resourceOf(path)
	return slices.Contains(withoutManagedFields, resource)
}

// resourceOf returns the resource that a path is of, and whether the path is in a namespace:
// …/apis/<group>/<version>[/namespaces/<namespace>]/<resource>[/<name>]. "" if it is of none, as what clients discover of the API server.
func resourceOf(path string) (resource string, namespaced bool) {
	_, path, _ = strings.Cut(path, "/apis/")
	parts := strings.Split(path, "/")
	switch {
	case len(parts) > 4 && parts[2] == "namespaces":
		return parts[4], true
	case len(parts) > 2:
		return parts[2], false
	}
	return "", false
}

// leanBuffer is more than most objects need.
const leanBuffer = 16 << 10

// managedFields is how the API server begins them: nothing but the name of a member can be between the comma and the colon, as a quotation mark
// in a string is escaped, and only commas, colons, brackets and spaces follow a string's end. One that is written in another way is left in.
var managedFields = []byte(`,"managedFields":[`)

// leanBody leaves out managed fields.
type leanBody struct {
	io.Closer

	from *bufio.Reader
	// Within managed fields: how many brackets are open, whether a string is, and whether the next byte of it is escaped.
	depth             int
	inString, escaped bool
}

// Read returns what is there; it waits for more only when there is nothing.
func (b *leanBody) Read(into []byte) (int, error) {
	if len(into) == 0 {
		return 0, nil
	}
	for {
		if b.from.Buffered() == 0 {
			if _, err := b.from.Peek(1); err != nil {
				return 0, err
			}
		}
		there, _ := b.from.Peek(b.from.Buffered()) // as many as are buffered are always there
		if b.depth > 0 {
			_, _ = b.from.Discard(b.skip(there))
			continue
		}
		plain := bytes.Index(there, managedFields)
		switch {
		case plain == 0:
			_, _ = b.from.Discard(len(managedFields))
			b.depth = 1
			continue
		case plain < 0:
			plain = len(there) - beginning(there)
		}
		if plain == 0 { // all that is there may be their beginning
			if _, err := b.from.Peek(len(there) + 1); err != nil {
				plain = len(there) // it was not
			} else {
				continue
			}
		}
		n := copy(into, there[:plain])
		_, _ = b.from.Discard(n)
		return n, nil
	}
}

// beginning returns how many bytes at the end may be the beginning of managed fields.
func beginning(there []byte) int {
	for n := min(len(there), len(managedFields)-1); n > 0; n-- {
		if bytes.HasSuffix(there, managedFields[:n]) {
			return n
		}
	}
	return 0
}

// skip returns how many of the bytes belong to managed fields.
func (b *leanBody) skip(there []byte) int {
	for i, c := range there {
		switch {
		case b.escaped:
			b.escaped = false
		case b.inString:
			b.escaped, b.inString = c == '\\', c != '"'
		case c == '"':
			b.inString = true
		case c == '[' || c == '{':
			b.depth++
		case c == ']' || c == '}':
			if b.depth--; b.depth == 0 {
				return i + 1
			}
		}
	}
	return len(there)
}
