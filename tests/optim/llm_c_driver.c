/* Train a GPT-2 with the code of llm.c, for test_llm_c.py.

   Arguments: MODEL BATCHES RESULT LEARNING_RATE BETA1 BETA2 EPSILON WEIGHT_DECAY

   MODEL is a model file of llm.c, version 3. BATCHES has the int32 numbers B, T and steps, and then
   for each step B * T inputs and B * T targets. RESULT receives fp32 numbers: the gradients of the
   first step, the loss of each step, and the weights after the last step. */

#define TESTING /* leave out the main function of llm.c */
#include "train_gpt2.c"

int main(int argc, char *argv[]) {
    if (argc != 9) {
        fprintf(stderr, "expected 8 arguments, received %d\n", argc - 1);
        return EXIT_FAILURE;
    }
    FILE *batches = fopenCheck(argv[2], "rb");
    FILE *result = fopenCheck(argv[3], "wb");
    float learning_rate = atof(argv[4]);
    float beta1 = atof(argv[5]);
    float beta2 = atof(argv[6]);
    float epsilon = atof(argv[7]);
    float weight_decay = atof(argv[8]);

    GPT2 model;
    gpt2_build_from_checkpoint(&model, argv[1]);
    int header[3];
    freadCheck(header, sizeof(int), 3, batches);
    int B = header[0];
    int T = header[1];
    int steps = header[2];
    int *inputs = mallocCheck(B * T * sizeof(int));
    int *targets = mallocCheck(B * T * sizeof(int));
    float *losses = mallocCheck(steps * sizeof(float));

    for (int step = 0; step < steps; step++) {
        freadCheck(inputs, sizeof(int), B * T, batches);
        freadCheck(targets, sizeof(int), B * T, batches);
        gpt2_forward(&model, inputs, targets, B, T);
        gpt2_zero_grad(&model);
        gpt2_backward(&model);
        losses[step] = model.mean_loss;
        if (step == 0) {
            fwrite(model.grads_memory, sizeof(float), model.num_parameters, result);
        }
        gpt2_update(&model, learning_rate, beta1, beta2, epsilon, weight_decay, step + 1);
    }
    fwrite(losses, sizeof(float), steps, result);
    fwrite(model.params_memory, sizeof(float), model.num_parameters, result);

    fcloseCheck(batches);
    fcloseCheck(result);
    gpt2_free(&model);
    free(inputs);
    free(targets);
    free(losses);
    return EXIT_SUCCESS;
}
