package hub

import (
	"bufio"
	"bytes"
	"io"
	"net/http"
	"slices"
	"strings"
)

// withoutManagedFields are the resources whose managed fields the agent does not read.
var withoutManagedFields = []string{"machines", "machinesets", "machineclaims"}

// Lean returns a transport that strips managed fields from the API server's responses, for the most
// numerous kinds. Managed fields make up almost half of a Machine, and the decoders scan each byte
// several times: this is most of the agent's work at startup.
func Lean(next http.RoundTripper) http.RoundTripper { return lean{next} }

type lean struct{ next http.RoundTripper }

// RoundTrip implements [http.RoundTripper].
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

// isLean reports whether a path names an object or a list of one of the resources.
func isLean(path string) bool {
	resource, _ := resourceOf(path)
	return slices.Contains(withoutManagedFields, resource)
}

// resourceOf returns the resource of a path, and whether the path is namespaced:
// …/apis/<group>/<version>[/namespaces/<namespace>]/<resource>[/<name>]. The resource is empty if
// the path has none, as in discovery requests.
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

// Kind returns the kind of objects that the path of a request is about, as the name of their
// resource. It is empty for discovery and for the kinds of the core API, which the agent rarely
// requests.
func Kind(path string) string {
	resource, _ := resourceOf(path)
	return resource
}

// leanBuffer is larger than most objects.
const leanBuffer = 16 << 10

// managedFields is how the API server's JSON begins the member. These bytes can only occur as the
// name of a member: a quotation mark within a string is escaped, and the end of a string is
// followed only by commas, colons, brackets and spaces. Managed fields in any other notation are
// left in.
var managedFields = []byte(`,"managedFields":[`)

// leanBody strips managed fields from a body.
type leanBody struct {
	io.Closer

	from *bufio.Reader
	// State within managed fields: the number of open brackets, whether a string is open, and
	// whether its next byte is escaped.
	depth             int
	inString, escaped bool
}

// Read returns the data that is available, and blocks only if there is none.
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
		there, _ := b.from.Peek(b.from.Buffered()) // buffered bytes are always available
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
		// The available bytes may be the beginning of managed fields.
		if plain == 0 {
			if _, err := b.from.Peek(len(there) + 1); err != nil {
				plain = len(there) // they were not
			} else {
				continue
			}
		}
		n := copy(into, there[:plain])
		_, _ = b.from.Discard(n)
		return n, nil
	}
}

// beginning returns how many of the last bytes may be the beginning of managed fields.
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
