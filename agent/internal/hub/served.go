package hub

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Served returns a transport that distinguishes a missing object from a resource that the API
// server does not serve, for example while its CRD is being recreated or serves another version.
// The server responds with 404 in both cases, which clients interpret as a missing object. In the
// second case the status becomes 503, which is a failed read.
func Served(next http.RoundTripper) http.RoundTripper { return served{next} }

type served struct{ next http.RoundTripper }

// RoundTrip implements [http.RoundTripper].
func (s served) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := s.next.RoundTrip(request)
	// If the object does not exist, the API server responds with a Status.
	_, namespaced := resourceOf(request.URL.Path)
	if err != nil || response.StatusCode != http.StatusNotFound || !namespaced ||
		!strings.HasPrefix(response.Header.Get("Content-Type"), "text/plain") {
		return response, err
	}
	_ = response.Body.Close() // its content is not needed
	status, err := json.Marshal(metav1.Status{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"},
		Status:   metav1.StatusFailure, Code: http.StatusServiceUnavailable, Reason: metav1.StatusReasonServiceUnavailable,
		Message: fmt.Sprintf("the API server does not serve %s: is its CRD installed, in this version?", request.URL.Path),
	})
	if err != nil {
		return nil, fmt.Errorf("encoding a status: %w", err)
	}
	changed := *response
	changed.StatusCode, changed.Status = http.StatusServiceUnavailable, "503 "+http.StatusText(http.StatusServiceUnavailable)
	changed.Header = http.Header{"Content-Type": []string{"application/json"}}
	changed.Body, changed.ContentLength = io.NopCloser(bytes.NewReader(status)), int64(len(status))
	return &changed, nil
}
