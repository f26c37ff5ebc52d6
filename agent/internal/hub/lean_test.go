package hub_test

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/hub"
)

type transport func(*http.Request) (*http.Response, error)

func (t transport) RoundTrip(request *http.Request) (*http.Response, error) { return t(request) }

// lean sends a request to a server that returns the text, a few bytes at a time. It returns what
// the caller reads.
func lean(t *rapid.T, method, path, text string, reader func(io.Reader) io.Reader) string {
	answer := transport(func(*http.Request) (*http.Response, error) {
		return &http.Response{
			StatusCode: http.StatusOK, Header: http.Header{"Content-Type": []string{"application/json"}},
			Body: io.NopCloser(reader(strings.NewReader(text))), ContentLength: int64(len(text)),
		}, nil
	})
	request, err := http.NewRequestWithContext(t.Context(), method, "https://hub"+path, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	response, err := hub.Lean(answer).RoundTrip(request)
	if err != nil {
		t.Fatal(err)
	}
	read, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	if err := response.Body.Close(); err != nil {
		t.Fatal(err)
	}
	return string(read)
}

// treacherous are texts that look like the beginning or the end of managed fields.
var treacherous = rapid.SampledFrom([]string{
	"", "a", `,"managedFields":[`, `managedFields`, `\`, `"`, `]`, `[{`, `},`, `,`, `\",\"managedFields\":[`, "é\u2028",
})

// value draws any decoded JSON value.
func value(t *rapid.T, depth int) any {
	switch kind := rapid.IntRange(0, 4).Draw(t, "kind"); {
	case kind == 0 && depth > 0:
		return rapid.SliceOfN(rapid.Custom(func(t *rapid.T) any { return value(t, depth-1) }), 0, 3).Draw(t, "list")
	case kind == 1 && depth > 0:
		return object(t, depth-1)
	case kind == 2:
		return float64(rapid.IntRange(-5, 5).Draw(t, "number"))
	case kind == 3:
		return rapid.SampledFrom([]any{true, false, nil}).Draw(t, "literal")
	}
	return treacherous.Draw(t, "text")
}

func object(t *rapid.T, depth int) map[string]any {
	keys := rapid.OneOf(treacherous, rapid.SampledFrom([]string{"kind", "metadata", "name", "spec"})).Filter(func(key string) bool {
		return key != "managedFields"
	})
	return rapid.MapOfN(keys, rapid.Custom(func(t *rapid.T) any { return value(t, depth) }), 0, 4).Draw(t, "object")
}

// drawManaged draws metadata, with and without the managed fields, which the API server writes
// last.
func drawManaged(t *rapid.T) (whole, left string) {
	name := treacherous.Draw(t, "name")
	before := map[string]any{"annotations": object(t, 1), "name": name}
	text := encode(t, before)
	if !rapid.Bool().Draw(t, "managed") {
		return text, text
	}
	managed := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) any { return value(t, 3) }), 0, 3).Draw(t, "managed fields")
	return strings.TrimSuffix(text, "}") + `,"managedFields":` + encode(t, managed) + "}", text
}

func encode(t *rapid.T, v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestLeanLeavesOutManagedFieldsAndNothingElse(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var whole, left strings.Builder
		for range rapid.IntRange(1, 4).Draw(t, "objects") { // as in a watch, one per line
			with, without := drawManaged(t)
			rest := encode(t, value(t, 3))
			whole.WriteString(`{"metadata":` + with + `,"spec":` + rest + "}\n")
			left.WriteString(`{"metadata":` + without + `,"spec":` + rest + "}\n")
		}
		reader := rapid.SampledFrom([]func(io.Reader) io.Reader{
			func(r io.Reader) io.Reader { return r }, iotest.OneByteReader, iotest.HalfReader, iotest.DataErrReader,
		}).Draw(t, "reader")
		path := rapid.SampledFrom([]string{
			"/apis/cluster.x-k8s.io/v1beta2/machines", "/apis/cluster.x-k8s.io/v1beta2/namespaces/a/machines",
			"/apis/cluster.x-k8s.io/v1beta2/namespaces/a/machines/m", "/apis/agent.karpenter.cluster.x-k8s.io/v1alpha1/namespaces/a/machineclaims",
		}).Draw(t, "path")
		if got := lean(t, http.MethodGet, path, whole.String(), reader); got != left.String() {
			t.Fatalf("of\n%s\nis left\n%s\nand not\n%s", whole.String(), got, left.String())
		}
	})
}

func TestLeanLeavesOthersAlone(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		text := rapid.StringMatching(`(,"managedFields":\[|\{|a)*`).Draw(t, "text")
		request := rapid.SampledFrom([][2]string{
			{http.MethodGet, "/apis/cluster.x-k8s.io/v1beta2/namespaces/machines/machinedeployments/machines"},
			{http.MethodGet, "/apis/cluster.x-k8s.io/v1beta2/namespaces/a/machinedeployments"},
			{http.MethodGet, "/api/v1/namespaces/machines"},
			{http.MethodPatch, "/apis/cluster.x-k8s.io/v1beta2/namespaces/a/machines/m"},
		}).Draw(t, "request")
		require.Equal(t, text, lean(t, request[0], request[1], text, iotest.HalfReader))
	})
}

// The events of a watch are not held back until further events arrive.
func TestLeanAnswersWithWhatIsThere(t *testing.T) {
	out, in := io.Pipe()
	answer := transport(func(*http.Request) (*http.Response, error) {
		return &http.Response{StatusCode: http.StatusOK, Header: http.Header{"Content-Type": []string{"application/json"}}, Body: out}, nil
	})
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://hub/apis/cluster.x-k8s.io/v1beta2/machines?watch=true", http.NoBody)
	require.NoError(t, err)
	response, err := hub.Lean(answer).RoundTrip(request)
	require.NoError(t, err)
	defer func() { require.NoError(t, response.Body.Close()) }()
	go func() {
		_, _ = io.WriteString(in, `{"metadata":{"name":"a","managedFields":[{}]}}`+"\n")
	}()
	buffer := make([]byte, 64)
	var read strings.Builder
	for !strings.HasSuffix(read.String(), "\n") {
		n, err := response.Body.Read(buffer)
		require.NoError(t, err)
		read.Write(buffer[:n])
	}
	require.Equal(t, `{"metadata":{"name":"a"}}`+"\n", read.String()) //nolint:testifylint // the text must be this one, line end included
}
